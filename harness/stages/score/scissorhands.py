"""Rows that the latest queries kept finding important; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Scorer):
    """Scissorhands (arXiv 2305.17118): a row loses a point for each of the last `window` queries t that gives it less than 1/t.

    t is the number of rows that the query sees, so 1/t is an even share. Queries do not judge rows later than themselves.
    The weights of a query group are averaged first, which the paper leaves undefined. The paper's history window is 400 and
    its protected recent window 10; counts tie often, and of equal rows the earlier one stays.
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
