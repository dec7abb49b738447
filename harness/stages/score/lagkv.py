"""Rows that stand out against the rows that follow them; it knows nothing of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """LagKV (arXiv 2504.04704): after the sinks, rows in parts of `lag`; each part is measured against the next one.

    A row's keys are scaled per channel by the minimum and maximum of the next part's keys; the standard deviation over
    channels, softmaxed over the part, is its key score. Values likewise; the score is the mean of both. The paper takes as
    many rows from every part: a row's score is therefore its rank in its part, divided by `lag`. Rows of the last whole
    part and after it have no reference and stay first, the newest before all. A channel in which the next part does not vary
    is scaled by 1. The paper's lag is 128.
    """

    lag: int = 128
    sinks: int = 4
    joint: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    def __post_init__(self) -> None:
        ok = isinstance(self.lag, int) and self.lag > 0
        require(ok, "keep.scorer.lag", self.lag, "a positive number of tokens")
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "keep.scorer.sinks", self.sinks, "a number of tokens, 0 or more, the same as keep.sinks")

    def score(self, view: LayerView) -> Tensor:
        scores_HN = 1 + view.pos_HN.float() / view.seen
        parts = (view.n - self.sinks) // self.lag
        if parts < 2:
            return scores_HN
        rows = slice(self.sinks, self.sinks + parts * self.lag)
        mean_HPL = (self._spread(view.k_HND[:, rows]) + self._spread(view.v_HND[:, rows])) / 2
        # Of equal scores the earlier row ranks higher, as everywhere.
        order_HPL = mean_HPL.argsort(dim=-1, descending=True, stable=True)
        rank_HPL = (self.lag - 1 - order_HPL.argsort(-1)).float() / self.lag
        scores_HN[:, self.sinks : rows.stop - self.lag] = rank_HPL.flatten(1)
        return scores_HN

    def _spread(self, x_HND: Tensor) -> Tensor:
        """Softmaxed spread of every row of all parts but the last, [H, P - 1, lag]."""
        x_HPLD = x_HND.unflatten(1, (-1, self.lag))  # type: ignore[no-untyped-call]
        low, high = x_HPLD[:, 1:].amin(2, keepdim=True), x_HPLD[:, 1:].amax(2, keepdim=True)
        width = torch.where(high > low, high - low, torch.ones_like(high))
        spread: Tensor = ((x_HPLD[:, :-1] - low) / width).std(-1).softmax(-1)
        return spread

    def default_recent(self, tokens: int, sinks: int) -> int:
        return self.lag
