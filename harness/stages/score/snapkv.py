"""SnapKV: attention of the last queries of the prompt, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """SnapKV (arXiv 2404.14469; kvpress: SnapKVPress, which averages over a query group after pooling).

    score_j = max over the `kernel` neighbours i of j of the sum over the last `window` queries t of a_ti, with a the
    attention weights, averaged over a query group before pooling. Pooling covers the tokens before the window only;
    the window is protected (`keep.recent` defaults to it).

    Window 32, max pooling and kernel 7 are the paper's experiments; the authors' class defaults to window 64, average pooling
    and kernel 5. Runs after prefill (or after each chunk); decoding then adds tokens to the cache.
    """

    joint: ClassVar[bool] = True

    window: int = 32
    kernel: int = 7
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked")

    def __post_init__(self) -> None:
        ok = isinstance(self.window, int) and self.window > 0
        require(ok, "keep.scorer.window", self.window, "a positive number of tokens")
        ok = isinstance(self.kernel, int) and self.kernel > 0 and self.kernel % 2 == 1
        require(ok, "keep.scorer.kernel", self.kernel, "a positive odd number")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def score(self, view: LayerView) -> Tensor:
        sums_HN = view.window_attention(self.window).sum(1)
        prompt = sums_HN[:, : max(sums_HN.shape[1] - self.window, 0)]
        if prompt.shape[1]:
            pooled = torch.nn.functional.max_pool1d(prompt[None], self.kernel, 1, self.kernel // 2)[0]
            sums_HN = torch.cat((pooled, sums_HN[:, prompt.shape[1] :]), 1)
        return sums_HN

    def default_recent(self, tokens: int, sinks: int) -> int:
        return self.window
