"""The same budget for every KV head of a layer: what most methods do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import HeadBudget


@dataclass(frozen=True, kw_only=True)
class Uniform(HeadBudget):
    """n_i = tokens unprotected tokens for every head."""

    by_shape: ClassVar[bool] = True

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        return [tokens] * int(scores_HM.shape[0])
