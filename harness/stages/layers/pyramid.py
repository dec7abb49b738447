"""PyramidKV: layer budgets that fall linearly from the first to the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from harness.errors import require
from harness.stages.apportion import apportion
from harness.stages.layers.beyond_protected import BeyondProtected
from harness.stages.protocols import LayerView

ROUNDINGS = ("exact", "floor")


@dataclass(frozen=True, kw_only=True)
class Pyramid(BeyondProtected):
    """PyramidKV (arXiv 2406.02069; kvpress: PyramidKVPress).

    With T context tokens, B = tokens - protected, n layers: least = B // beta, most = 2 B - least, and
    budget_l = protected + most - (most - least) * l / (n - 1) for l = 0 .. n - 1.
    If most > T - protected: most = T - protected, least = 2 B - most. If T < 2 B: every layer gets `tokens`.

    protected: tokens that every layer keeps besides its share; null takes sinks + recent of the keep (SnapKV's window). If
        they are the whole budget, as in a sliding window, all layers get the same.
    rounding: "exact" rounds so that the mean over layers is `tokens`; "floor" is the authors' code, which floors the slope, so
        that the mean is up to (n - 1) / 2 tokens above what was asked for.
    """

    by_shape: ClassVar[bool] = True

    beta: int = 20
    rounding: str = "exact"

    def __post_init__(self) -> None:
        require(isinstance(self.beta, int) and self.beta > 1, "keep.layers.beta", self.beta, "a whole number above 1")
        super().__post_init__()
        require(self.rounding in ROUNDINGS, "keep.layers.rounding", self.rounding, f"allowed are {', '.join(ROUNDINGS)}")

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
