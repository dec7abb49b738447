"""Jobs as Ray tasks, each sent once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.sweep.launch import CommandLauncher, need
from harness.sweep.supervise import Command


class RayLauncher(CommandLauncher):
    """Tasks of a Ray cluster.

    Args:
        init: arguments of ray.init; without an address a head is started here and ends with the launch.
        remote: options of every task.
    """

    def __init__(self, *, init: Mapping[str, Any], remote: Mapping[str, Any]) -> None:
        need("ray", "ray", "ray")
        self.init = {key: value for key, value in init.items() if value is not None}
        self.remote = dict(remote)

    def run_commands(self, commands: Sequence[Command], sweep: Path) -> None:
        """Send the jobs and wait for all; a worker that Ray loses has an outcome only if its job came to an end."""
        # A head started here gives its workers a niceness of 15 otherwise: beside other work they would hardly run.
        os.environ.setdefault("RAY_worker_niceness", "0")
        import ray

        ray.init(**self.init)
        try:
            task = ray.remote(**self.remote)(_run)
            waiting = [task.remote(command) for command in commands]
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=1)
        finally:
            ray.shutdown()


def _run(command: Command) -> None:
    command()
