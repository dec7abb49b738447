"""Rows drawn by lot, the floor every scorer must beat; it knows nothing of their content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class Random(Scorer):
    """A uniform draw per layer, KV head and position, fixed by the seed: a row keeps its lot for as long as it is stored.

    With sinks and a recent window this is BigBird's pattern (arXiv 2007.14062) as a cache rule.
    """

    seed: int = 0

    def score(self, view: LayerView) -> Tensor:
        pos_HN = view.pos_HN
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + view.seed) * 1_009 + view.layer)
        lots_HT = torch.rand(view.seen, pos_HN.shape[0], generator=generator).T  # position first: a lot never moves as T grows
        return lots_HT.to(pos_HN.device).gather(1, pos_HN.long())
