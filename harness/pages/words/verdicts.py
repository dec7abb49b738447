"""How far a verdict may be from the truth, in its unit: `equal within ±0.10`, `no loss seen (≤ 0.20)`, `worse`."""

from __future__ import annotations

from typing import NamedTuple

from harness.analysis.intervals import EQUAL, OPEN
from harness.analysis.points import Row
from harness.pages.units import difference, score_text, small

MAYBE = f"{OPEN}, a loss was seen"  # beside the verdicts of the points table, which does not tell these two apart
NATS = " nats"  # the unit of streams
BOUND = "X"  # what stands for the number in the words of a verdict


class Compared(NamedTuple):
    """A paired difference to another point and its verdict; `unit` is empty for shares of a score, NATS for streams."""

    verdict: str
    value: float
    low: float
    high: float
    higher_is_better: bool
    unit: str = ""

    @property
    def loss(self) -> float:
        """What was seen; below 0 is a gain."""
        return -self.value if self.higher_is_better else self.value

    @property
    def most(self) -> float:
        """The largest loss that the interval holds."""
        return -self.low if self.higher_is_better else self.high

    @property
    def key(self) -> str:
        """The verdict as the glossary tells it apart: an open one with a loss from one without."""
        return MAYBE if self.verdict == OPEN and self.loss > 0 else self.verdict

    @property
    def bound(self) -> str:
        """How far the difference may be from 0 (equal), or how large a loss may be."""
        return amount(max(-self.low, self.high) if self.verdict == EQUAL else self.most, self.unit)

    @property
    def harmless(self) -> bool:
        """Whether nothing says that the point does worse: equal within noise or better, or open and no loss was seen."""
        proven = self.high < 0 if self.higher_is_better else self.low > 0
        return not proven and (self.verdict in (EQUAL, "above") or self.key == OPEN)


def compared(row: Row) -> Compared:
    """A point of a points table beside the full cache, or of a table of contrasts beside the point it names."""
    value, verdict = ("diff_to_against", "verdict") if "verdict" in row else ("diff_to_full", "vs_full")
    found, higher = difference(row, value), bool(row["higher_is_better"])
    unit = NATS if found.in_nats else "" if higher else f" of {row['metric']}"
    return Compared(str(row[verdict]), found.value, found.low, found.high, higher, unit)


def amount(value: float, unit: str) -> str:
    """A loss or a distance with its unit: of shares as their intervals are printed, two digits where these are small."""
    digits = f"{value:#.2g}" if unit == NATS and value < 9.95 else small(value) if value < 0.0095 else score_text(value)
    return f"{digits}{unit}"
