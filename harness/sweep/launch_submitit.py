"""Jobs through submitit: on a SLURM cluster, or as processes of this machine.

The end of a job is read from its own folder, and whether it still lives from squeue. submitit's pickles and sacct are not
asked: without accounting they never tell that a job died, and sacct calls a job that raised completed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from getpass import getuser
from pathlib import Path
from typing import Any

from harness.errors import UserError, require
from harness.sweep import outcome
from harness.sweep.launch import CommandLauncher, need
from harness.sweep.supervise import Command

CLUSTERS = ("slurm", "local")


class Resumed(Command):
    """A command that submitit may send again after a preemption or a time limit: it does only what is missing."""

    def checkpoint(self) -> Any:
        """What submitit is to send again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SubmititLauncher(CommandLauncher):
    """Array tasks of a cluster, or processes of this machine.

    Args:
        cluster: slurm | local.
        options: submitit's own parameters by their own names; null leaves one out.
        at_once: jobs that run at the same time.
        poll_s: seconds between two looks.
        patience_s: how long the word of a job that is gone may take over a shared disk.
    """

    def __init__(self, *, cluster: str, options: Mapping[str, Any], at_once: int, poll_s: float, patience_s: float) -> None:
        require(cluster in CLUSTERS, "hydra.launcher.cluster", cluster, "one of " + ", ".join(CLUSTERS))
        require(isinstance(at_once, int) and at_once > 0, "hydra.launcher.at_once", at_once, "a positive number of jobs")
        for key, value in (("poll_s", poll_s), ("patience_s", patience_s)):
            require(value >= 0, f"hydra.launcher.{key}", value, "seconds, 0 or more")
        need("submitit", "slurm" if cluster == "slurm" else "submitit_local", "slurm")
        self.cluster, self.at_once, self.poll_s, self.patience_s = cluster, at_once, poll_s, patience_s
        self.options = {key: value for key, value in options.items() if value is not None}

    def run_commands(self, commands: Sequence[Command], sweep: Path) -> None:
        """Send the jobs and wait for their outcomes; a job that is gone without one is waited for no longer."""
        executor = self._executor(sweep)
        resumed = [Resumed(arguments=c.arguments, folder=c.folder, cwd=c.cwd) for c in commands]
        slurm = self.cluster == "slurm"
        size = len(resumed) if slurm else self.at_once  # an array limits itself; processes of this machine do not
        for group in (resumed[i : i + size] for i in range(0, len(resumed), size)):
            jobs = {job.job_id: (job, Path(c.folder)) for job, c in zip(executor.submit_array(group), group, strict=True)}
            self._wait(jobs, _in_queue if slurm else _running)

    def _executor(self, sweep: Path) -> Any:
        import submitit

        try:
            executor = submitit.AutoExecutor(folder=sweep / ".submitit" / "%j", cluster=self.cluster)
            executor.update_parameters(**self.options, slurm_array_parallelism=self.at_once)
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"hydra.launcher: submitit says {str(error).splitlines()[0]}") from None
        return executor

    def _wait(self, jobs: Mapping[str, tuple[Any, Path]], alive: Callable[[Mapping[str, Any]], set[str]]) -> None:
        gone: dict[str, float] = {}  # when a job without an outcome was first missed
        waiting = set(jobs)
        while waiting:
            time.sleep(self.poll_s)
            waiting = {job for job in waiting if outcome.read(jobs[job][1]) is None}
            now, missed = time.monotonic(), waiting - alive({job: jobs[job][0] for job in waiting})
            gone = {job: gone.get(job, now) for job in missed}
            waiting -= {job for job in missed if now - gone[job] >= self.patience_s}


def _running(jobs: Mapping[str, Any]) -> set[str]:
    return {name for name, job in jobs.items() if not job.done()}


def _in_queue(jobs: Mapping[str, Any]) -> set[str]:
    """Jobs that SLURM still holds, pending, running or requeued; all of them while it does not answer."""
    command = ["squeue", "--noheader", "--array", f"--user={getuser()}", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return set(jobs)
    return set(jobs) & set(done.stdout.split()) if done.returncode == 0 else set(jobs)
