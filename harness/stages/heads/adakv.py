"""Ada-KV: head budgets by how many of the best scores of a layer each head has."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.apportion import apportion
from harness.stages.protocols import HeadBudget


@dataclass(frozen=True, kw_only=True)
class AdaKV(HeadBudget):
    """Ada-KV (arXiv 2407.11550; kvpress: AdaKVPress, which masks; here heads are stored with different lengths).

    b_i = number of head i's tokens among the H * tokens best scores of the layer; n_i = (1 - alpha) * b_i + alpha * tokens,
    rounded so that the layer's sum stays H * tokens. Ties: the earlier head, then the earlier token.

    Scores must be comparable between heads, as attention weights are. alpha is the share that every head gets regardless:
    0.2 as in later code of the authors and kvpress, 0.5 in the authors' README.
    """

    spends_all: ClassVar[bool] = True

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
