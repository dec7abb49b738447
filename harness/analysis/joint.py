"""Frontiers over several tasks of one model, and over several models of one task: mean normalised score at the same point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.frontier import non_dominated, plain
from harness.analysis.point_row import BASE

ARM = ["stack", "point", "stack_config"]
OVER = {"tasks": "model", "models": "task"}  # what a joint frontier is over, and what its members have in common


def joint(ranked: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry for each model with several tasks, and each task with several models, in either mode; see `_entry`.

    A score is (score - chance) / (full - chance), so 1 is the full cache and 0 a guess. Only points that every member ranked
    have a place, and only members whose full cache is better than chance count.
    """
    table = ranked[ranked["left_out"].isna() & ranked["discriminative"].ne(False)]
    full = table["full_score"].where(table["stack"] != BASE, table["score"])
    table = table.assign(normalised=(table["score"] - table["chance"]) / (full - table["chance"]))
    table = table[np.isfinite(table["normalised"]) & np.isfinite(table["ratio"])]
    return [entry for over, common in OVER.items() for entry in _entries(table, over, common)]


def _entries(table: pd.DataFrame, over: str, common: str) -> Iterator[dict[str, Any]]:
    member = "task" if over == "tasks" else "model"
    for (name, aware), group in table.groupby([common, "query_aware"], sort=False):
        members = group.drop_duplicates([member, "run_id"])
        if group[member].nunique() < 2 or len(members) > group[member].nunique():
            continue  # two runs of one member are not two members
        entry = _entry(group, group[member].unique().tolist())
        if entry is not None:
            yield {"over": over, common: name, "query_aware": bool(aware), **entry}


def _entry(group: pd.DataFrame, members: list[str]) -> dict[str, Any] | None:
    """Points with mean normalised score and mean byte ratio, and which of them nobody beats."""
    parts = group.groupby(ARM, sort=False).agg(
        label=("label", "first"),
        n=("normalised", "size"),
        score=("normalised", "mean"),
        worst=("normalised", "min"),
        ratio=("ratio", lambda ratios: math.exp(np.mean(np.log(ratios)))),
    )
    whole = parts[parts["n"] == len(members)].reset_index()
    if len(whole) < 2:
        return None
    on = non_dominated(whole["ratio"].to_numpy(), whole["score"].to_numpy().round(12), higher_is_better=True)
    points = [
        {
            "stack": row["stack"],
            "label": row["label"],
            **{name: plain(float(row[name])) for name in ("ratio", "score", "worst")},
            "on_frontier": bool(kept),
        }
        for row, kept in zip(whole.sort_index().to_dict("records"), on, strict=True)
    ]
    return {
        "members": members,
        "axes": "x geometric mean of the byte ratios; y mean of (score - chance) / (full - chance); worst: the smallest",
        "points": sorted(points, key=lambda point: (point["ratio"], point["label"])),
    }
