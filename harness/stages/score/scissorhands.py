"""Scissorhands: tokens that stay important over many queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Scorer):
    """Scissorhands (arXiv 2305.17118; kvpress: none).

    score_j = -(number of the last `window` queries t that see token j and have a_tj < 1 / n_t), with a the attention weights
    and n_t the number of stored tokens that query t sees, so that 1 / n_t is a uniform share.

    Not defined by the paper: with grouped queries the weights are averaged over the group before the comparison. Counts tie
    often; of equal tokens the earlier stays. The paper's history window is 400 and its protected recent window 10.
    """

    window: int = 400
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked")

    def __post_init__(self) -> None:
        ok = isinstance(self.window, int) and self.window > 0
        require(ok, "keep.scorer.window", self.window, "a positive number of tokens")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def score(self, view: LayerView) -> Tensor:
        weights_HWN = view.window_attention(self.window)
        w = weights_HWN.shape[1]
        q_pos_W = torch.arange(view.seen - w, view.seen, device=weights_HWN.device)
        visible_HWN = view.pos_HN[:, None, :] <= q_pos_W[None, :, None]
        even_HW1 = 1 / visible_HWN.sum(-1, keepdim=True)
        return -(visible_HWN & (weights_HWN < even_HW1)).sum(1).float()

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 10
