"""Which points nobody beats: weak dominance and hypervolume on a points table.

A point is beaten when another one needs no more bytes, scores no worse, and is better in one of the two. Ties and exact
duplicates therefore stay. Points are only ranked against points of the same run: same model, task, examples and mode.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.analysis.labels import family_of
from harness.analysis.point_row import BASE

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

GROUP = ("run_id", "model", "task", "query_aware")
X_AXIS = {
    "name": "bytes_context",
    "unit": "bytes",
    "direction": "lower is better",
    "meaning": "allocated KV bytes of one sample after its context was compressed (streams: the time mean), mean over samples",
}


def non_dominated(cost: Floats, score: Floats, *, higher_is_better: bool) -> Mask:
    """Mask (points,) of those no other point beats; lower cost is better. All values must be finite."""
    gain = score if higher_is_better else -score
    sizes, which = np.unique(cost, return_inverse=True)
    best = np.full(len(sizes), -np.inf)  # of the points of each cost
    np.maximum.at(best, which, gain)
    cheaper = np.maximum.accumulate(np.append(-np.inf, best))[:-1]  # the best of all that cost less
    return np.asarray((gain == best[which]) & (gain > cheaper[which]), dtype=np.bool_)


def hypervolume(saving: Floats, quality: Floats) -> float:
    """Area above (0, 0) covered by the points, both axes "more is better"; negative coordinates count as 0."""
    x, y = np.clip(saving, 0, None), np.clip(quality, 0, None)
    order = np.argsort(-x)
    best = np.maximum.accumulate(y[order])
    return float(np.sum(-np.diff(np.append(x[order], 0.0)) * best))


def rank(points: pd.DataFrame) -> pd.DataFrame:
    """The table with `on_frontier` (bool) and `left_out` (why a point was not ranked, else missing)."""
    ranked = points.assign(on_frontier=False, left_out=pd.Series(pd.NA, index=points.index, dtype="string"))
    for _, group in _groups(points):
        most = int(group["n"].max())
        reasons = {index: _left_out(row, most) for index, row in group.iterrows()}
        kept = [index for index, reason in reasons.items() if reason is None]
        ranked.loc[list(reasons), "left_out"] = pd.array(list(reasons.values()), dtype="string")
        if kept:
            table = group.loc[kept]
            mask = non_dominated(
                table["bytes_context"].to_numpy(),
                table["score"].to_numpy(),
                higher_is_better=bool(table["higher_is_better"].iloc[0]),
            )
            ranked.loc[kept, "on_frontier"] = mask
    return ranked


def frontier(ranked: pd.DataFrame) -> dict[str, Any]:
    """Content of frontier.json from a ranked table: axes with their directions, one frontier per run and mode."""
    groups = [_group_entry(group) for _, group in _groups(ranked)]
    return {"schema": 1, "x": X_AXIS, "discriminative": _all_known([g["discriminative"] for g in groups]), "groups": groups}


def _all_known(answers: list[bool | None]) -> bool | None:
    """Of all groups together: False where one is not, None where one is not known."""
    return False if False in answers else None if None in answers or not answers else True


def _groups(points: pd.DataFrame) -> Any:
    return points.groupby(list(GROUP), sort=False)


def _left_out(row: pd.Series[Any], most: int) -> str | None:
    if row["n"] == 0:
        counted = ("refused", "failed", "truncated", "unscored")
        counts = ", ".join(f"{row[f'n_{name}']} {name}" for name in counted if row[f"n_{name}"])
        reason: str | None = f"no score: {counts or 'no record'}"
    elif not (math.isfinite(row["score"]) and math.isfinite(row["bytes_context"])):
        axis = "bytes are" if math.isfinite(row["score"]) else "score is"
        reason = f"{axis} not finite"
    elif row["n_without_bytes"]:
        reason = f"bytes of {row['n_without_bytes']} of {row['n']} examples are missing or not above zero"
    elif row["n"] < most and not (row["adaptive"] and row["n"] == row["n_prompts"]):  # that many resolved it
        reason = f"scored on {row['n']} of {most} examples"
    elif row["n_not_exercised"] == row["n"] and row["stack"] != BASE:
        reason = "nothing was compressed"
    else:
        reason = None
    return reason


def _group_entry(group: pd.DataFrame) -> dict[str, Any]:
    first = group.iloc[0]
    front = group[group["on_frontier"]].sort_values(["bytes_context", "score", "label"])
    base = group[(group["stack"] == BASE) & group["score"].notna()]
    volume, missing = _volume(group, base)
    better = "higher" if first["higher_is_better"] else "lower"
    return {
        **{name: first[name] for name in ("run_id", "model", "task")},
        "query_aware": bool(first["query_aware"]),
        "y": {"name": first["metric"], "aggregate": first["aggregate"], "direction": f"{better} is better"},
        "chance": plain((base if len(base) else group)["chance"].iloc[0]),
        "full_score": plain(base["score"].iloc[0]) if len(base) else None,
        "discriminative": bool(base["discriminative"].iloc[0]) if base["discriminative"].notna().any() else None,
        "hypervolume": volume,
        "hypervolume_missing": missing,
        "hypervolume_by_family": _by_family(group, base),
        "hypervolume_axes": "x log2(full bytes / bytes), y (score - chance) / (full - chance); reference (0, 0)",
        "frontier": [_point_entry(row) for _, row in front.iterrows()],
        "left_out": [
            {"stack": row["stack"], "label": row["label"], "reason": row["left_out"], "score": plain(row["score"])}
            for _, row in group[group["left_out"].notna()].iterrows()
        ],
    }


def _by_family(group: pd.DataFrame, base: pd.DataFrame) -> dict[str, float]:
    """The hypervolume of the points of each family of stacks by themselves; empty where there is none."""
    families = group["stack_config"].map(lambda text: family_of(json.loads(text)))
    volumes = {str(name): _volume(points, base)[0] for name, points in group.groupby(families) if name != BASE}
    return {name: volume for name, volume in sorted(volumes.items()) if volume is not None}


def _volume(group: pd.DataFrame, base: pd.DataFrame) -> tuple[float | None, str | None]:
    if base.empty:
        return None, "no full-cache score"
    chance, full = float(base["chance"].iloc[0]), float(base["score"].iloc[0])
    higher = bool(base["higher_is_better"].iloc[0])
    if not math.isfinite(full - chance) or (full <= chance if higher else full >= chance):
        return None, "the full cache is no better than chance, or no chance score is known"
    known = group[group["left_out"].isna() & (group["ratio"] > 0)]
    quality = (known["score"].to_numpy() - chance) / (full - chance)
    return hypervolume(-np.log2(known["ratio"].to_numpy()), quality), None


def _point_entry(row: pd.Series[Any]) -> dict[str, Any]:
    sizes = ("bytes_context", "bytes_full", "ratio")
    scores = ("score", "score_lo", "score_hi", "diff_to_full", "diff_lo", "diff_hi")
    return {
        **{name: row[name] for name in ("stack", "label", "point", "storage", "positions", "phase")},
        "n": int(row["n"]),
        **{name: plain(row[name]) for name in (*sizes, *scores)},
    }


def plain(value: float) -> float | str | None:
    """A number as strict JSON has it: missing is null, infinities are words."""
    if math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
