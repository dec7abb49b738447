"""Cells of the maps: one configuration at one asked length and depth; only what a map shows, so that many cells stay cheap."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.analysis.intervals import UNKNOWN, Estimate, estimate
from harness.analysis.point_measures import chance_of, discriminative, mean, number
from harness.analysis.point_row import (
    BASE,
    RUN_GROUP,
    Point,
    Record,
    configurations,
    example_of,
    is_scored,
    sample_of,
    spread,
)

SPLIT = ("length", "depth")
_NAMED = ("run_id", "model", "task", "query_aware", "attn", "stack", "metric")
_NONE = Estimate(math.nan, UNKNOWN)


def cell_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of `points.cells`, in the order the configurations first appear; records without a place in numbers are left out."""
    placed = [record for record in records if all(isinstance(record.get(name), int | float) for name in SPLIT)]
    bases: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in placed:
        if record["stack"] == BASE:
            bases[tuple(record[name] for name in (*RUN_GROUP, *SPLIT))][example_of(record)] = record
    known: dict[Any, Estimate] = {}
    return [_row(point, bases.get(point.run, {}), known) for point in configurations(placed, SPLIT)]


def _row(point: Point, base: Mapping[Any, Record], known: dict[Any, Estimate]) -> dict[str, Any]:
    first, scored = point.first, list(point.scored.values())
    same = [base[example] for example in point.scored if example in base and is_scored(base[example])]
    score = _estimate(scored, first, known)
    full = _estimate(same, first, known) if len(same) == len(scored) else _NONE
    context = np.array([number(record["kv_bytes_context"]) for record in scored])
    realised = np.array([number(record.get("depth_realised")) for record in point.latest.values()])
    return {
        **dict(zip(SPLIT, point.extra, strict=True)),
        **{name: first[name] for name in _NAMED},
        "label": point.label,
        "n": len(scored),
        **spread("score", score),
        "full_score": full.value,
        "discriminative": discriminative(
            full, chance_of(scored or point.group, first["aggregate"]), not first["higher_is_better"]
        ),
        "bytes_context": mean(context),
        "depth_realised": mean(realised),
    }


def _estimate(records: Sequence[Record], first: Record, known: dict[Any, Estimate]) -> Estimate:
    """The estimate of these scores, asked once for all cells that have the same: stacks often agree on a few examples."""
    if not records:
        return _NONE
    sample, how = sample_of(records), first["aggregate"]
    same = (how, first["higher_is_better"], sample.scores.tobytes(), sample.weights.tobytes(), *sample.groups)
    if same not in known:
        known[same] = estimate(sample, how)
    return known[same]
