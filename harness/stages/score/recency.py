"""Recency: the newest tokens stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class Recency(Scorer):
    """score_j = position of j.

    With sinks: StreamingLLM (arXiv 2309.17453; kvpress: StreamingLLMPress). The authors' code rotates keys by their index in
    the cache: that is compress.positions=cache; with positions=original every key keeps the rotation of its own position.
    Without sinks: a sliding window. With many sinks ("global" tokens): Longformer's pattern (arXiv 2004.05150).
    """

    joint: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        return view.pos_HN.float()

    def default_recent(self, tokens: int, sinks: int) -> int:
        return tokens - sinks
