"""CriticalKV: SnapKV scores weighted by the size of the values."""

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
    """A variant of CriticalKV (arXiv 2502.03805; kvpress: CriticalKVPress).

    score_j = (a_j + epsilon) * ||v_j||_1, with a_j the SnapKV score divided by the number of queries in the window.

    Differs from the paper: it takes ||W_o v_j||_1, and W_o is not available to a scorer; it spends the first half of the
    budget on a_j alone and weights the second half only, while here all unprotected tokens are weighted. Epsilon is the
    paper's 1e-4.
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
