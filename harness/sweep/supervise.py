"""Runs one job of a sweep as the command a user would type, `python -m harness ...`, and sees that it has an outcome.

Either as a process of its own, so that a signal ends only the job, or inside a worker that keeps its model for the next
job. It imports nothing heavy, since on a cluster it runs beside the job.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.sweep import outcome
from harness.sweep.outcome import Outcome

LOG, TRACE = "log.txt", "traceback.txt"  # what a job printed, and what ended it, in its folder


@dataclass(frozen=True, kw_only=True)
class Command:
    """A job as a command line.

    Attributes:
        arguments: of `python -m harness`.
        folder: the job's own: its output (log.txt) and its outcome; absolute.
        cwd: where the sweep was started, so that relative paths mean the same.
    """

    arguments: tuple[str, ...]
    folder: str
    cwd: str

    def __call__(self) -> None:
        """Run it as a process of its own."""
        outcome.start(Path(self.folder))
        begin = time.monotonic()
        with (Path(self.folder) / LOG).open("ab") as log:
            code = subprocess.run(
                [sys.executable, "-m", "harness", *self.arguments],
                cwd=self.cwd,
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        self.close(f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}", time.monotonic() - begin)

    def inside(self) -> None:
        """Run it in this process, which is a worker and writes to the job's log from here on."""
        begin = time.monotonic()
        os.environ.update(self._environment())
        os.chdir(self.cwd)
        with (Path(self.folder) / LOG).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = ["harness", *self.arguments]
        try:
            runpy.run_module("harness", run_name="__main__", alter_sys=False)
        except SystemExit as ended:
            self.close(f"exit code {ended.code}", time.monotonic() - begin)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def close(self, how: str, seconds: float) -> None:
        """Leave word of a job that could not do so itself; its last printed line may say why."""
        folder = Path(self.folder)
        if outcome.read(folder) is None:
            log = folder / LOG
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            reason = ": ".join([how, *lines[-1:]]) + f" ({log})"
            outcome.end(folder, Outcome(status="crashed", reason=reason, seconds=round(seconds, 3)))

    def _environment(self) -> dict[str, str]:
        return {outcome.VARIABLE: self.folder, "TQDM_DISABLE": "1"}


def printed(folder: Path) -> str:
    """What is known of a job's end: its traceback, else all it printed; empty where there is neither."""
    found = next((file for file in (folder / TRACE, folder / LOG) if file.exists()), None)
    return "" if found is None else found.read_text(encoding="utf-8", errors="replace")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
