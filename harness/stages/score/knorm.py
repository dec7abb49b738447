"""Rows with small keys; it knows nothing of queries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Scorer):
    """L2 norm of keys (arXiv 2406.11430): a low norm draws attention, so the score is -||k||."""

    def score(self, view: LayerView) -> Tensor:
        return -view.k_HND.norm(dim=-1)

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
