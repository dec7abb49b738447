"""Neighbouring layers share one store (CLA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import require
from harness.stages.share.sharing import Share


@dataclass(frozen=True, kw_only=True)
class AdjacentLayers(Share):
    """Of every `factor` layers the first has a store, which the others read: cross-layer attention (CLA, arXiv 2405.12981).

    Differs from the paper: its models are trained so, and their layers without a store have no projections of keys and values;
    here a trained model's layers read rows that are not theirs, instead of what their own projections make.
    """

    factor: int = 2

    def __post_init__(self) -> None:
        ok = isinstance(self.factor, int) and self.factor > 1
        require(ok, "share.factor", self.factor, "a number of layers above 1 that share a store")

    def owners(self, layers: Sequence[int]) -> Mapping[int, int]:
        return {layer: layers[at - at % self.factor] for at, layer in enumerate(layers) if at % self.factor}

    @property
    def words(self) -> str:
        return f"{self.factor} layers a store"
