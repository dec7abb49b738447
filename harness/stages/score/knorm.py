"""Rows with small keys; it knows nothing of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Scorer):
    """L2 norm of keys (arXiv 2406.11430): a low norm draws attention, so the score is -||k||."""

    joint: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        norms_HN: Tensor = torch.linalg.vector_norm(view.k_HND, dim=-1)
        return -norms_HN

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
