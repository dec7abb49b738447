"""LagKV: tokens that differ from the partition that follows theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """LagKV (arXiv 2504.04704; kvpress: LagKVPress).

    After `sinks` tokens the context is cut into partitions of `lag` tokens; partition p is compared with p + 1:
    x' = (x - min_{p+1}) / (max_{p+1} - min_{p+1}) per channel; u_j = softmax over the partition of std over channels of
    x'_j; u = (u of keys + u of values) / 2. The paper keeps equally many tokens of every partition, so
    score_j = (rank of u_j in its partition) / lag, in [0, 1).

    Tokens of the last whole partition, and those after it, have no reference: their scores are above 1 and rise with the
    position. A channel that is constant in p + 1 is divided by 1. The paper's lag is 128.
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
        partitions = (view.n - self.sinks) // self.lag
        if partitions < 2:
            return scores_HN
        whole = slice(self.sinks, self.sinks + partitions * self.lag)
        mean_HPL = (self._spread(view.k_HND[:, whole]) + self._spread(view.v_HND[:, whole])) / 2
        # Ties: the earlier token ranks higher, as in Keep.
        order_HPL = mean_HPL.argsort(dim=-1, descending=True, stable=True)
        rank_HPL = (self.lag - 1 - order_HPL.argsort(-1)).float() / self.lag
        scores_HN[:, self.sinks : whole.stop - self.lag] = rank_HPL.flatten(1)
        return scores_HN

    def _spread(self, x_HND: Tensor) -> Tensor:
        """Scores u of all partitions but the last: x [H, P * lag, D] -> [H, P - 1, lag]."""
        x_HPLD = x_HND.unflatten(1, (-1, self.lag))  # type: ignore[no-untyped-call]
        low, high = x_HPLD[:, 1:].amin(2, keepdim=True), x_HPLD[:, 1:].amax(2, keepdim=True)
        width = torch.where(high > low, high - low, torch.ones_like(high))
        spread: Tensor = ((x_HPLD[:, :-1] - low) / width).std(-1).softmax(-1)
        return spread

    def default_recent(self, tokens: int, sinks: int) -> int:
        return self.lag
