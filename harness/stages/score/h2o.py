"""Heavy hitters: rows that received the most attention so far; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """H2O (arXiv 2306.14048): S_j = sum over all queries so far of softmax(q k^T)_j; a sum, not normalised by age.

    With grouped queries, which the paper leaves undefined, the sum is averaged over the group's query heads. Evicted rows
    lose their sum; new rows start at 0. In every phase but `prefill` the sums live on in the store and count as bytes.
    """

    joint: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def score(self, view: LayerView) -> Tensor:
        assert view.stats.column_sums_HN is not None
        return view.stats.column_sums_HN
