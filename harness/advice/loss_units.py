"""What independent units say of a point beside the full cache: records to arrays, in the order in which units were asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis.point_measures import number
from harness.analysis.point_row import Point, document_of, is_scored

Floats = NDArray[np.float64]
Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)  # known by identity: arrays have no hash
class Units:
    """One value a unit (a document, `group_id`), over the questions that both were scored on.

    Attributes:
        names: the units, in the order in which they were asked.
        losses: mean over the unit's questions of max(0, full - arm), in [0, 1]; for right and wrong answers the share of
            questions that the full cache answers right and the arm wrong, which bounds the net loss from above.
        differences: mean of arm - full, in [-1, 1].
    """

    names: tuple[str, ...]
    losses: Floats
    differences: Floats

    @property
    def n(self) -> int:
        """Units."""
        return len(self.names)

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or 1."""
        return bool(np.isin(self.losses, (0.0, 1.0)).all())


def bounded(record: Record) -> bool:
    """Whether the score of a record is a share of 1, so that a loss has limits: perplexities and costs have none."""
    return bool(record["higher_is_better"]) and record["aggregate"] == "mean"


def units(point: Point, base: Mapping[Any, Record]) -> Units:
    """The units of a point whose questions the full cache (`base`, by example) was scored on too."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for example, record in point.scored.items():
        if example in base and is_scored(base[example]):
            pair = number(record["score"]), number(base[example]["score"])
            found[f"{record['seed']} {document_of(record)}"].append(pair)
    losses = [np.mean([max(0.0, full - arm) for arm, full in pairs]) for pairs in found.values()]
    differences = [np.mean([arm - full for arm, full in pairs]) for pairs in found.values()]
    return Units(tuple(found), np.array(losses, dtype=np.float64), np.array(differences, dtype=np.float64))
