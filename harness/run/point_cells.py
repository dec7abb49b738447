"""Cells of the maps: one configuration at one asked length and depth; only what a map shows, so that many cells stay cheap."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from harness.run.point_measures import mean, number
from harness.run.point_row import BASE, RUN_GROUP, Point, Record, configurations, discriminative, example_of, is_scored, sample_of, spread
from harness.run.statistics import UNKNOWN, Estimate, estimate

SPLIT = ("length", "depth")
_NAMED = ("run_id", "model", "task", "query_aware", "attn", "stack", "metric")
_NONE = Estimate(math.nan, UNKNOWN)

Bases = Mapping[tuple[Any, ...], Mapping[Any, Record]]


def cell_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of `points.cells`, in the order the configurations first appear; records without a place are left out."""
    placed = [record for record in records if all(record.get(name) is not None for name in SPLIT)]
    bases: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in placed:
        if record["stack"] == BASE:
            bases[tuple(record[name] for name in (*RUN_GROUP, *SPLIT))][example_of(record)] = record
    known: dict[tuple[Any, ...], Estimate] = {}
    return [_row(point, _full(point, bases, known)) for point in configurations(placed, SPLIT)]


def _full(point: Point, bases: Bases, known: dict[tuple[Any, ...], Estimate]) -> Estimate:
    """The full cache's score on the point's examples, unknown where it lacks one; asked once for all stacks of a cell."""
    base = bases.get(point.run, {})
    if not point.scored or not all(example in base and is_scored(base[example]) for example in point.scored):
        return _NONE
    asked = (*point.run, *point.scored)
    if asked not in known:
        known[asked] = estimate(sample_of([base[example] for example in point.scored]), point.first["aggregate"])
    return known[asked]


def _row(point: Point, full: Estimate) -> dict[str, Any]:
    first, scored = point.first, list(point.scored.values())
    score = estimate(sample_of(scored), first["aggregate"]) if scored else _NONE
    context = np.array([number(record["kv_bytes_context"]) for record in scored])
    realised = np.array([number(record.get("depth_realised")) for record in point.latest.values()])
    return {
        **dict(zip(SPLIT, point.extra, strict=True)),
        **{name: first[name] for name in _NAMED},
        "label": point.label,
        "n": len(scored),
        **spread("score", score),
        "full_score": full.value,
        "discriminative": discriminative(full, first["chance"], not first["higher_is_better"]),
        "bytes_context": mean(context),
        "depth_realised": mean(realised),
    }
