"""The same rows for every layer; it knows nothing of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.stages.protocols import LayerBudget, LayerView


@dataclass(frozen=True, kw_only=True)
class Uniform(LayerBudget):
    """Every layer keeps `tokens` rows per KV head."""

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        return [tokens] * len(views)
