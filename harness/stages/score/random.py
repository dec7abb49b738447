"""Random scores: the floor that every scorer must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.hashing import mix
from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class Random(Scorer):
    """Uniform random scores (kvpress: RandomPress).

    score_j in [0, 1) is a hash of `seed`, the example's seed, layer, KV head and position, so a token keeps its score for as
    long as it is stored. With sinks and a recent window this is BigBird's pattern (arXiv 2007.14062) as a cache rule.
    """

    seed: int = 0

    def score(self, view: LayerView) -> Tensor:
        heads_H1 = torch.arange(view.pos_HN.shape[0], device=view.pos_HN.device)[:, None]
        state = mix(torch.full_like(heads_H1, self.seed), view.seed, view.layer)
        return mix(mix(state, heads_H1), view.pos_HN.long()).float() / (1 << 24)
