"""The same rows for every KV head of a layer; it knows nothing of layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.stages.protocols import HeadBudget


@dataclass(frozen=True, kw_only=True)
class Uniform(HeadBudget):
    """Every head keeps `tokens` unprotected rows."""

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        return [tokens] * int(scores_HM.shape[0])
