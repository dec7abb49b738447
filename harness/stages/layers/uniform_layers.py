"""The same budget for every layer: what most methods do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from harness.stages.protocols import LayerBudget, LayerView


@dataclass(frozen=True, kw_only=True)
class Uniform(LayerBudget):
    """budget_l = tokens, per KV head, in every layer."""

    by_shape: ClassVar[bool] = True

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        return [tokens] * len(views)
