"""Key norm: keys with a small L2 norm stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Scorer):
    """Key norm (arXiv 2406.11430; kvpress: KnormPress): score_j = -||k_j||_2, as low norms go with high attention.

    The authors leave the first two layers uncompressed; here all layers are compressed.
    """

    joint: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        norms_HN: Tensor = torch.linalg.vector_norm(view.k_HND, dim=-1)
        return -norms_HN

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
