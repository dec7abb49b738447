"""H2O: accumulated attention (heavy hitters)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """H2O (arXiv 2306.14048; kvpress: ObservedAttentionPress, which averages over the queries that see a token).

    score_j = sum over all queries t so far of softmax(s q_t K^T)_j, s the attention scale; not divided by the token's age,
    as in the authors' code. New tokens start at 0; an evicted token's sum is dropped.

    Not defined by the paper: with grouped queries the sum is averaged over the query heads of a KV head. In every phase but
    `prefill` the fp32 sums are stored with the cache (4 bytes a token and KV head) and count as bytes.
    """

    joint: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def score(self, view: LayerView) -> Tensor:
        assert view.stats.column_sums_HN is not None
        return view.stats.column_sums_HN
