"""The upper layers share one store (YOCO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from harness.errors import require
from harness.stages.share.sharing import Share


@dataclass(frozen=True, kw_only=True)
class UpperLayers(Share):
    """Layers from `start` of the depth on read the store of the first of them (YOCO, arXiv 2405.05254).

    Differs from the paper: its models are trained so; their lower half attends to a window, or has a recurrent state, so that
    it stores next to nothing, while here it keeps a store a layer; and what the upper half reads has projections of its own,
    of the lower half's output, while here it is what the first of the upper layers stores.
    """

    start: float = 0.5

    def __post_init__(self) -> None:
        ok = isinstance(self.start, (int, float)) and 0 <= self.start < 1
        require(ok, "share.start", self.start, "a share of the layers, at least 0 and below 1")

    def owners(self, layers: Sequence[int]) -> Mapping[int, int]:
        first = int(Fraction(str(self.start)) * len(layers))
        return dict.fromkeys(layers[first + 1 :], layers[first])

    @property
    def words(self) -> str:
        return f"layers from {self.start:g} on share a store"
