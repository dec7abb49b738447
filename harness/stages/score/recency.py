"""Later rows matter more; it knows nothing of their content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class Recency(Scorer):
    """Score = position. With sinks this is StreamingLLM (arXiv 2309.17453) at original positions; without, a plain window."""

    joint: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        return view.pos_HN.float()

    def default_recent(self, tokens: int, sinks: int) -> int:
        return tokens - sinks
