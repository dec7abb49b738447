"""More rows for KV heads whose attention is spread wide; it knows nothing of layers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.apportion import apportion
from harness.stages.protocols import HeadBudget


@dataclass(frozen=True, kw_only=True)
class AdaKV(HeadBudget):
    """Ada-KV (arXiv 2407.11550): a head gets as many rows as it has among the best H * tokens of the whole layer.

    A floor: n_i = (1 - alpha) * that + alpha * tokens, rounded so that the layer's sum stays H * tokens. Scores must be
    comparable between heads, as attention weights are. Of equal scores the earlier head, then the earlier row comes first.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        ok = isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1
        require(ok, "keep.heads.alpha", self.alpha, "a fraction, from 0 to 1")

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        h, m = scores_HM.shape
        if not tokens or not m:
            return [0] * h
        best = scores_HM.flatten().argsort(descending=True, stable=True)[: h * tokens]
        won: list[int] = torch.bincount(best // m, minlength=h).tolist()
        alpha = Fraction(str(self.alpha))
        return apportion([(1 - alpha) * n + alpha * tokens for n in won], h * tokens)
