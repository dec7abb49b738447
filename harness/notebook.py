"""`harness.evaluate`: a run from Python, composed, keyed and stored exactly as `python -m harness` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from omegaconf import OmegaConf

from harness.analysis.frontier import rank
from harness.analysis.point_row import BASE
from harness.analysis.points import points
from harness.command import counted, make
from harness.configure.arms import arms_of
from harness.configure.from_python import composed, model_overrides, overrides_of
from harness.configure.objects import described, divided, with_values
from harness.configure.typed import build
from harness.errors import UserError, require
from harness.pages import table
from harness.pages.dashboard import drawable
from harness.pages.frontier_figure import frontier
from harness.pages.looks import looks
from harness.records.current import current_records
from harness.stages.stack import Stack
from harness.types import Task

Stacks = str | Stack | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What was asked for, read from the run folder.

    Attributes:
        folder: the run folder; its points.csv and dashboard.html hold all of its records, those of earlier calls too.
        keys: of the records that this call asked for.
        failures: a line for each record that failed.
    """

    folder: Path
    keys: frozenset[str]
    failures: tuple[str, ...] = ()

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records that were asked for, as dictionaries (`results/README.md` names the fields)."""
        return [record for record in current_records(self.folder)[0].records if record["key"] in self.keys]

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row per stack and budget: score with interval, paired difference to the full cache, bytes, `on_frontier`."""
        return rank(points(self.records))

    def frontier(self) -> go.Figure:
        """Score against KV bytes, the full cache and the frontier marked: the figure of the dashboard."""
        ready = drawable(self.points)
        return frontier(ready, looks(ready["stack"], BASE))

    def __str__(self) -> str:
        """The table and the counts that the command prints."""
        return f"{table.text(self.points)}\n{counted(self.records)}\n{self.folder}"


def evaluate(
    *,
    model: str | PathLike[str] = "smollm2",
    stacks: Stacks | None = None,
    task: str | Task = "needle",
    limit: int | None = None,
    **overrides: Any,
) -> Run:
    """Run stacks on a task's examples; what is in the run folder already is not made again.

    Args:
        model: a member of conf/model, a folder with a model, or a repository ORG/NAME of the hub.
        stacks: names of conf/compress, `Stack` values, lists [NAME, OVERRIDE, ...], or a dictionary from labels to `Stack`
            values; None runs the default experiment. The full cache is always added.
        task: a member of conf/task, or an object that is a `Task`.
        limit: how many examples of every seed, None for all.
        overrides: any other key of the configuration; `__` is a dot: task__lengths=[300], seed=[0, 1], results_dir="out".

    Returns:
        The run. Failed and refused records are in it, counted and never averaged.

    Raises:
        UserError: whatever cannot be run, in one line, before any model loads where that is possible.
    """
    if not isinstance(task, str):
        _check_task(task, overrides)
    named, values = divided(stacks) if stacks is not None else ([], [])
    given = [*model_overrides(model), *overrides_of({"limit": limit} | overrides)]
    given += [] if stacks is None else overrides_of({"stacks": named or ["full"]})
    given += overrides_of({"task": task}) if isinstance(task, str) else []
    composition = composed(given)
    arms = with_values(arms_of(composition, given), values)
    config: dict[str, Any] = OmegaConf.to_container(composition, resolve=True)  # type: ignore[assignment]
    if isinstance(task, str):
        made = make(config, arms)
    else:
        config["task"] = described(task, "task")
        made = make(config, arms, lambda part, where: task if where == "task" else build(part, where))
    return Run(made.folder, made.asked, made.failures)


def _check_task(task: Any, overrides: Mapping[str, Any]) -> None:
    """A task that is an object offers what a task must, and nothing of it is overridden."""
    lacks = [
        name for name in ("name", "metric", "chance", "query_aware", "chat", "examples", "score") if not hasattr(task, name)
    ]
    require(not lacks, "task", task, f"a member of conf/task or an object with {', '.join(lacks)}")
    changed = next((key for key in overrides if key.replace("__", ".").startswith("task.")), None)
    if changed:
        raise UserError(f"{changed} changes nothing of a task that is an object: set it where the object is made")
