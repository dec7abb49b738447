"""What independent units say of a point beside the full cache: records to arrays, in the order in which units were asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analysis.clusters import Units, paired
from harness.analysis.point_measures import number
from harness.analysis.point_row import Point, document_of, is_scored

Record = Mapping[str, Any]


def bounded(record: Record) -> bool:
    """Whether the score of a record is a share of 1, so that a loss has limits: perplexities and costs have none."""
    return bool(record["higher_is_better"]) and record["aggregate"] == "mean"


def units(point: Point, base: Mapping[Any, Record]) -> Units:
    """The units of a point whose questions the full cache (`base`, by example) was scored on too.

    Answers that never read a compressed store are equal to the full cache's and say nothing of the point: none of the units.
    """
    both = ((record, base[example]) for example, record in point.scored.items() if example in base)
    return paired(
        (str(document_of(record)), number(record["score"]), number(full["score"]))
        for record, full in both
        if is_scored(full) and record["status"] == "ok"
    )
