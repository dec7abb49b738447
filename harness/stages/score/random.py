"""Random scores: the floor that every scorer must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        state = _mix(torch.full_like(heads_H1, self.seed), view.seed, view.layer)
        return _mix(_mix(state, heads_H1), view.pos_HN.long()).float() / (1 << 24)


def _mix(state: Tensor, *more: Tensor | int) -> Tensor:
    """24-bit hash of integers, the same on every device: wrapping int64 products and shifts (splitmix64 style)."""
    for value in more:
        state = (state + 1) * -7046029254386353131 ^ (torch.as_tensor(value) + 1) * -4658895280553007687
        state = (state ^ ((state >> 29) & ((1 << 35) - 1))) * -7723592293110705685
        state = (state >> 20) & ((1 << 24) - 1)
    return state
