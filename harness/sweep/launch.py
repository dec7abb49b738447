"""What launchers that start a process for every job share.

Hydra's own in-process launcher and its joblib plugin need nothing from here: they call the task function itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from harness.configure.again import sources
from harness.errors import UserError
from harness.sweep.supervise import Command


def need(module: str, launcher: str, extra: str) -> None:
    """Refuse a launcher whose engine is not installed.

    Raises:
        UserError: with what to install.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"hydra/launcher={launcher} needs {module}: pip install 'kv-harness[{extra}]'")


class CommandLauncher(Launcher):
    """A launcher whose jobs are commands; `run_commands` returns when every one has an outcome or cannot have one any more."""

    config: DictConfig

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration of the sweep; the task function is not needed, a command is."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; their folders say how they went, so there is nothing to return."""
        hydra, cwd = self.config.hydra, Path.cwd()
        sweep = cwd / str(hydra.sweep.dir)
        commands = [
            Command(arguments=(*sources(hydra), *overrides), folder=str(sweep / str(number)), cwd=str(cwd))
            for number, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        for command in commands:
            Path(command.folder).mkdir(parents=True, exist_ok=True)
        self.run_commands(commands, sweep)
        return []

    def run_commands(self, commands: Sequence[Command], sweep: Path) -> Any:
        """Run them all; `sweep` is the folder for the engine's own files."""
        raise NotImplementedError
