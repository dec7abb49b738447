"""How many tokens a stack may keep: a number, a fraction of the context, or as many as fit into bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from harness.errors import require

UNITS = ("tokens", "fraction", "bytes")


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A budget, solved once per example into tokens per layer and KV head (averages, if layers or heads divide it unevenly).

    unit: "tokens": the number itself. "fraction": ceil(value * tokens of the context), in exact decimal arithmetic.
    "bytes": the most tokens, the same in every layer and head, whose stored bytes (with metadata, positions and scores) are
    at most value.
    """

    unit: str = "fraction"
    value: float

    def __post_init__(self) -> None:
        require(self.unit in UNITS, "keep.budget.unit", self.unit, f"allowed are {', '.join(UNITS)}")
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        require(number, "keep.budget.value", self.value, "a number")
        if self.unit == "fraction":
            require(0 < self.value <= 1, "keep.budget.value", self.value, "a fraction is above 0 and at most 1")
        else:
            whole = float(self.value).is_integer() and self.value > 0
            require(whole, "keep.budget.value", self.value, f"a positive whole number of {self.unit}")

    def tokens(self, context: int, nbytes: Callable[[int], int]) -> int:
        """Tokens per layer and head for a context of `context` tokens; nbytes(n) predicts the bytes of n tokens per head."""
        if self.unit == "tokens":
            return int(self.value)
        if self.unit == "fraction":
            return ceil(Fraction(str(self.value)) * context)
        # No bisection: bytes are not monotone in n. They fall when a block is full and gets encoded, and when the whole context
        # stays, as no positions are stored then.
        return next((n for n in range(context, 0, -1) if nbytes(n) <= self.value), 0)
