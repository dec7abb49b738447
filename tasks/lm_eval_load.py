"""Loads lm-eval's tasks by name, with random generators seeded anew before each task makes its data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harness.errors import UserError, require
from harness.files.remote_code import no_remote_code

OTHER_SEED = 1234  # lm-eval's own default for numpy, torch and few-shot draws; python's is 0, like ours


def load_tasks(names: Sequence[str], metadata: Mapping[str, Any], include_path: str | None, seed: int) -> dict[str, Any]:
    """lm-eval's tasks and groups of these names, data included; UserError for those that are not available."""
    manager = _manager(names, metadata, include_path)
    try:
        with _seeded_downloads(seed), no_remote_code():
            return dict(manager.load(list(names)))
    except ImportError as error:
        hint = "pip install 'lm-eval[ruler]'" if "wonderwords" in str(error) else "install the package it names"
        raise UserError(f"task.name={'+'.join(names)} needs a package that is not there ({_line(error)}): {hint}") from None
    except (ConnectionError, OSError) as error:
        raise UserError(f"task.name={'+'.join(names)}: its data cannot be had (no network?): {_line(error)}") from None
    except (ValueError, RuntimeError, AssertionError, KeyError) as error:
        raise UserError(f"task.name={'+'.join(names)} cannot be loaded: {_line(error)}") from None


def _manager(names: Sequence[str], metadata: Mapping[str, Any], include_path: str | None) -> Any:
    """lm-eval's task manager; its thousands of YAMLs are read only if the tasks are not in `include_path`."""
    from lm_eval.tasks import TaskManager  # seconds to import

    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False, metadata=dict(metadata))
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=include_path, metadata=dict(metadata))
    unknown = [name for name in names if not manager.match_tasks([name])]
    require(not unknown, "task.name", unknown, "lm-eval has no such task or group (python -m lm_eval ls tasks)")
    return manager


@contextmanager
def _seeded_downloads(seed: int) -> Iterator[None]:
    """Seed the process-wide generators before each task makes its data.

    Tasks such as RULER's draw from them while they load; only here is there a moment between two of them.
    """
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(self: Any, *args: Any, **kwargs: Any) -> Any:
        random.seed(seed)
        np.random.seed(OTHER_SEED + seed)
        torch.manual_seed(OTHER_SEED + seed)
        return original(self, *args, **kwargs)

    ConfigurableTask.download = download
    try:
        yield
    finally:
        ConfigurableTask.download = original


def chat_template(render: Callable[..., str]) -> Callable[..., str]:
    """lm-eval's chat_template callable over `render(messages, **how)`."""

    def templated(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render(history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)

    return templated


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
