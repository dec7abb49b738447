"""How many rows a stack may keep: tokens, a fraction of the context, or bytes; it knows nothing of how rows are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from harness.errors import require

UNITS = ("tokens", "fraction", "bytes")


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A budget. It is solved once per example, from the tokens of the compressed context, into rows per layer and KV head.

    tokens: rows. fraction: ceil(value * context tokens), in exact decimal arithmetic. bytes: the most rows, the same in
    every layer and head, whose stored bytes (metadata, positions and scores included) do not exceed the value.
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
        """Rows per layer and head for a context of `context` tokens; nbytes(n) predicts a store of n rows."""
        if self.unit == "tokens":
            return int(self.value)
        if self.unit == "fraction":
            return ceil(Fraction(str(self.value)) * context)
        # No bisection: bytes fall where a block fills up and is encoded, and where a whole context stores no positions.
        return next((n for n in range(context, 0, -1) if nbytes(n) <= self.value), 0)
