"""More rows for the lower layers, on a straight line; it knows nothing of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from harness.errors import require
from harness.stages.apportion import apportion
from harness.stages.protocols import LayerBudget, LayerView

ROUNDINGS = ("exact", "floor")


@dataclass(frozen=True, kw_only=True)
class Pyramid(LayerBudget):
    """PyramidKV (arXiv 2406.02069): the budget beyond `protected` rows falls in a straight line from first to last layer.

    With B = tokens - protected: the last layer gets B // beta, the first 2 B less that; where the first would exceed the
    context (T - protected) it gets all of it and the last 2 B less that. A context shorter than 2 B: every layer gets B.

    protected: rows that every layer keeps besides its share; null for those of the keep (its sinks + recent, SnapKV's window).
        A keep that protects its whole budget, such as a window, leaves nothing to share out: every layer gets as much.
    rounding: exact gives whole numbers whose mean is the budget; floor is the authors' code, which steps by the whole part of
        the slope, so that the upper layers, and their mean, get up to (layers - 1) / 2 rows more than asked for.
    """

    beta: int = 20
    protected: int | None = None
    rounding: str = "exact"

    def __post_init__(self) -> None:
        require(isinstance(self.beta, int) and self.beta > 1, "keep.layers.beta", self.beta, "a whole number above 1")
        ok = self.protected is None or (isinstance(self.protected, int) and self.protected >= 0)
        require(ok, "keep.layers.protected", self.protected, "a number of tokens, 0 or more, or null for sinks + recent")
        require(self.rounding in ROUNDINGS, "keep.layers.rounding", self.rounding, f"allowed are {', '.join(ROUNDINGS)}")

    def beyond(self, protected: int) -> LayerBudget:
        return self if self.protected is not None else replace(self, protected=protected)

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        protected = self.protected or 0
        n, each = len(views), tokens - protected
        context = views[0].seen if views else 0
        if n < 2 or each < 1 or context < 2 * each:
            return [tokens] * n
        most = min(2 * each - each // self.beta, context - protected)
        least = 2 * each - most
        if self.rounding == "floor":
            step = (most - least) // (n - 1)
            return [most - i * step + protected for i in range(n)]
        line = [most - Fraction((most - least) * i, n - 1) for i in range(n)]
        return [share + protected for share in apportion(line, n * each)]
