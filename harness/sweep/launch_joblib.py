"""Jobs in worker processes of this machine, through joblib's process pool.

Every worker is a pool of its own: in a shared one a job that dies takes its neighbours along. A worker runs one job after
another and so loads a model once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.engine.batches import one_line
from harness.errors import require
from harness.sweep.launch import CommandLauncher, need
from harness.sweep.supervise import Command


class JoblibLauncher(CommandLauncher):
    """Workers of this machine.

    Args:
        n_jobs: how many; each holds a model.
    """

    def __init__(self, *, n_jobs: int) -> None:
        require(isinstance(n_jobs, int) and n_jobs > 0, "hydra.launcher.n_jobs", n_jobs, "a positive number of workers")
        need("joblib", "joblib", "joblib")
        self.n_jobs = n_jobs

    def run_commands(self, commands: Sequence[Command], sweep: Path) -> None:
        """Run the jobs, n_jobs at a time, each worker taking the next when it is free."""
        todo = iter(commands)
        with ThreadPoolExecutor(min(self.n_jobs, len(commands))) as slots:
            for slot in [slots.submit(_work, todo) for _ in range(min(self.n_jobs, len(commands)))]:
                slot.result()


def _work(todo: Iterator[Command]) -> None:
    """One worker's life; when a job ends it, the next job gets a new one."""
    from joblib.externals.loky import ProcessPoolExecutor

    worker = None
    for command in todo:
        worker = worker or ProcessPoolExecutor(max_workers=1)
        begin = time.monotonic()
        try:
            worker.submit(command.inside).result()
        except Exception as error:  # the worker died, or the job raised what cannot be sent to another process
            worker.shutdown(kill_workers=True)
            worker = None
            command.close(_how(error), time.monotonic() - begin)
    if worker is not None:
        worker.shutdown()


def _how(error: Exception) -> str:
    codes = re.search(r"exit codes? of the workers? (?:are|is) \{(.+?)\}", str(error))
    return f"the worker died, {codes[1]}" if codes else one_line(error)
