"""Rows that the last queries look at, weighted by their values; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView
from harness.stages.score.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class CriticalKV(SnapKV):
    """CriticalKV style (arXiv 2502.03805): (a + epsilon) ||v||_1, with a the SnapKV score as a mean over the window.

    A variant in two ways: the paper takes the norm of W_o v, which a scorer does not see, and gives half of the budget by a
    alone before it weights; here every unprotected row is weighted. Its epsilon is 1e-4.
    """

    epsilon: float = 1e-4
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = isinstance(self.epsilon, (int, float)) and self.epsilon >= 0
        require(ok, "keep.scorer.epsilon", self.epsilon, "a number, 0 or more")

    def score(self, view: LayerView) -> Tensor:
        queries = view.stats.queries_QWD
        assert queries is not None
        mean_HN = super().score(view) / min(self.window, queries.shape[1])
        norms_HN: Tensor = torch.linalg.vector_norm(view.v_HND, ord=1, dim=-1)
        return (mean_HN + self.epsilon) * norms_HN
