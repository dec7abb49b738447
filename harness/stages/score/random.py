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
        heads_H1 = torch.arange(view.pos_HN.shape[0], device=view.pos_HN.device)[:, None]
        lots = _mix(torch.full_like(heads_H1, self.seed), view.seed, view.layer)
        return _mix(_mix(lots, heads_H1), view.pos_HN.long()).float() / (1 << 24)


def _mix(state: Tensor, *more: Tensor | int) -> Tensor:
    """Hash of integers to 24 bits, the same on every device: multiplications that wrap, and shifts of what is left."""
    for value in more:
        state = (state + 1) * -7046029254386353131 ^ (torch.as_tensor(value) + 1) * -4658895280553007687
        state = (state ^ ((state >> 29) & ((1 << 35) - 1))) * -7723592293110705685
        state = (state >> 20) & ((1 << 24) - 1)
    return state
