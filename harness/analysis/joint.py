"""Frontiers over several tasks of one model, and over several models of one task: what the same point does on all of them.

Each member keeps its own unit: a loss on questions is a share of answers, a loss on streams is nats a token. Where all members
score shares, a point's score is also their mean between a guess and the full cache. Nats have no such place (a uniform guess is
so far off that every loss would vanish), so with a stream among the members nothing is averaged: a point is on the joint
frontier where no other point needs no more bytes, does no worse on every member, and is better in one of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.frontier import Floats, Mask, non_dominated, plain
from harness.analysis.point_row import BASE
from harness.analysis.points import Row

ARM = ["stack", "point", "stack_config"]
RUN = ["run_id", "attn"]  # what a member's rows have in common
OVER = {"tasks": "model", "models": "task"}  # what a joint frontier is over, and what its members have in common
NATS = "nats a token"
_STREAM = "exp_weighted"  # how scores are joined that are perplexities


Arm = tuple[str, ...]


def arm_of(row: Row) -> Arm:
    """The values of ARM of a row of a points table or of a point of an entry: the same in every member, as no label is."""
    return tuple(str(row[name]) for name in ARM)


def joint(ranked: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry for each model with several tasks, and each task with several models, in either mode; see `_entry`.

    A stream asks no question, so it stands beside questions of both modes. Only points that every member ranked have a place,
    and only members whose full cache is better than chance count.
    """
    table = ranked[ranked["left_out"].isna() & ranked["discriminative"].ne(False)]
    full = table["full_score"].where(table["stack"] != BASE, table["score"])
    share = (table["score"] - table["chance"]) / (full - table["chance"])
    stream = table["aggregate"] == _STREAM
    table = table.assign(normalised=share.mask(stream))
    known = np.isfinite(table["normalised"]) | (stream & np.isfinite(table["score"]))
    table = table[known & np.isfinite(table["ratio"])]
    return [entry for over, common in OVER.items() for entry in _entries(table, over, common)]


def _entries(table: pd.DataFrame, over: str, common: str) -> Iterator[dict[str, Any]]:
    member = "task" if over == "tasks" else "model"
    for (name, aware), group in _groups(table, common):
        members = group.drop_duplicates([member, *RUN])
        if group[member].nunique() < 2 or len(members) > group[member].nunique():
            continue  # two runs of one member are not two members
        entry = _entry(group, member, group[member].unique().tolist())
        if entry is not None:
            runs = {str(row[member]): {part: str(row[part]) for part in RUN} for row in members.to_dict("records")}
            yield {"over": over, common: name, "query_aware": bool(aware), "runs": runs, **entry}


def _groups(table: pd.DataFrame, common: str) -> Iterator[tuple[tuple[str, bool], pd.DataFrame]]:
    """What may be ranked together, by its common name and mode: the questions of a mode, and streams with any of them."""
    for name, group in table.groupby(common, sort=False):
        asks = group["chunk"].isna()
        for aware in group.loc[asks, "query_aware"].unique().tolist() or [False]:
            yield (str(name), aware), group[~asks | (group["query_aware"] == aware)]


def _entry(group: pd.DataFrame, member: str, members: list[str]) -> dict[str, Any] | None:
    """Points with their mean byte ratio and what each lost on every member, and which of them nobody beats."""
    found = [rows for _, rows in group.groupby(ARM, sort=False) if len(rows) == rows[member].nunique() == len(members)]
    arms = [rows.set_index(member).loc[members] for rows in found]
    if len(arms) < 2:
        return None
    ratios = np.array([math.exp(np.mean(np.log(rows["ratio"]))) for rows in arms])
    shares = np.array([rows["normalised"].to_numpy() for rows in arms])
    means = shares.mean(axis=1)
    mixed = bool(np.isnan(shares).any())
    if mixed:
        signs = np.where(arms[0]["higher_is_better"], 1.0, -1.0)
        on = unbeaten(ratios, np.array([rows["score"].to_numpy() * signs for rows in arms]))
    else:
        on = non_dominated(ratios, means.round(12), higher_is_better=True)
    points = [
        {
            **dict(zip(ARM, arm_of(rows.iloc[0]), strict=True)),
            "label": rows["label"].iloc[0],
            "ratio": plain(float(ratio)),
            "score": None if mixed else plain(float(mean)),
            "worst": None if mixed else plain(float(part.min())),
            "against_full": {name: _against(row) for name, row in zip(members, rows.to_dict("records"), strict=True)},
            "on_frontier": bool(kept),
        }
        for rows, ratio, part, mean, kept in zip(arms, ratios, shares, means, on, strict=True)
    ]
    y = "every member's own difference to the full cache" if mixed else "mean of (score - chance) / (full - chance)"
    return {
        "members": members,
        "units": dict(zip(members, map(_unit, arms[0].to_dict("records")), strict=True)),
        "better": dict(zip(members, np.where(arms[0]["higher_is_better"], "higher", "lower").tolist(), strict=True)),
        "axes": f"x geometric mean of the byte ratios; y {y}" + ("" if mixed else "; worst: the smallest"),
        "points": sorted(points, key=lambda point: (point["ratio"], point["label"])),
    }


def unbeaten(cost: Floats, gains: Floats) -> Mask:
    """Mask (points,) of those no other point beats on cost (points,) and on all gains (points, members); ties stay."""
    kept = np.ones(len(cost), dtype=np.bool_)
    for i in range(len(cost)):
        no_worse = (cost <= cost[i]) & (gains >= gains[i]).all(axis=1)
        better = (cost < cost[i]) | (gains > gains[i]).any(axis=1)
        kept[i] = not (no_worse & better).any()
    return kept


def _unit(row: Mapping[Any, Any]) -> str:
    return NATS if row["aggregate"] == _STREAM else str(row["metric"])


def _against(row: Mapping[Any, Any]) -> dict[str, Any]:
    """The paired difference to the full cache in the member's unit, its interval and its verdict."""
    value, low, high = _NAMES[row["aggregate"] == _STREAM]
    return {
        "n": int(row["n"]),
        "difference": plain(row[value]),
        "low": plain(row[low]),
        "high": plain(row[high]),
        "verdict": row["vs_full"],
    }


_NAMES: Mapping[bool, Sequence[str]] = {
    True: ("nll_diff", "nll_diff_lo", "nll_diff_hi"),
    False: ("diff_to_full", "diff_lo", "diff_hi"),
}
