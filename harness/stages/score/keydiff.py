"""Rows whose keys differ from the others; it knows nothing of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """KeyDiff (arXiv 2504.15364): minus the cosine similarity of a key to the anchor, the mean of all unit keys.

    Distinctive keys draw attention. Up to a factor this is minus the mean cosine similarity to all stored keys, itself
    included. Keys are taken as stored: rotated, protected rows included in the anchor. The paper protects no row.
    """

    joint: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")

    def score(self, view: LayerView) -> Tensor:
        anchor_H1D = normalize(view.k_HND, dim=-1).mean(1, keepdim=True)
        return -cosine_similarity(view.k_HND, anchor_H1D, dim=-1)

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
