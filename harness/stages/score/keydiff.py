"""KeyDiff: keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from harness.stages.protocols import LayerView, Scorer


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """KeyDiff (arXiv 2504.15364; kvpress: KeyDiffPress).

    score_j = -cos(k_j, a), with the anchor a = mean over all stored tokens i of k_i / ||k_i||. Up to a positive factor this
    is minus the mean cosine similarity to all stored keys, k_j included.

    Keys are those after RoPE; protected tokens are part of the anchor. As in the paper no token is protected by default.
    """

    joint: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")

    def score(self, view: LayerView) -> Tensor:
        anchor_H1D = normalize(view.k_HND, dim=-1).mean(1, keepdim=True)
        return -cosine_similarity(view.k_HND, anchor_H1D, dim=-1)

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
