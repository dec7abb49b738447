"""When an arm has seen enough units: the stopping rule of `limit=auto`."""

from __future__ import annotations

from harness.advice.sequences import Floats, sequence
from harness.analysis.clusters import CONFIDENCE

FIRST = 12  # units of the first round
GROWTH = 1.25  # of the number of units, from round to round


def resolved(differences: Floats, precision: float, confidence: float = CONFIDENCE) -> bool:
    """Whether the interval of a paired difference in [-1, 1] excludes 0, or reaches at most `precision` to either side.

    The interval holds at every number of units, so it may be looked at after each round.
    """
    found = sequence(differences, -1.0, 1.0, confidence)
    return 0.0 not in found or found.half_width <= precision


def rounds(most: int) -> list[int]:
    """How many units there are after each round, up to all of them."""
    found = [min(FIRST, most)]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * GROWTH))))
    return found
