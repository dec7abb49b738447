"""ChunkKV: scores of whole chunks of neighbouring tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Scorer):
    """ChunkKV (arXiv 2502.00299; kvpress: ChunkKVPress).

    score_j = sum of a_ti over the last `window` queries t and over all tokens i in the chunk of j, with a the attention
    weights, averaged over a query group. Chunks of `chunk` tokens are counted from the first token; the window itself is
    protected. Tokens of one chunk tie, so whole chunks stay; the last chunk that fits is cut to its first tokens.

    As in the paper: chunk 10, per KV head. Left out: the paper's reuse of one layer's indices in the next layers. A shorter
    last chunk before the window has a smaller sum; it is not normalised by its length.
    """

    window: int = 32
    chunk: int = 10
    joint: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked")

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, f"keep.scorer.{name}", value, "a positive number of tokens")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def score(self, view: LayerView) -> Tensor:
        sums_HN = view.window_attention(self.window).sum(1)
        n = max(view.n - self.window, 0)
        prompt_HN = torch.nn.functional.pad(sums_HN[:, :n], (0, -n % self.chunk))
        chunks_HC = prompt_HN.unflatten(1, (-1, self.chunk)).sum(-1)  # type: ignore[no-untyped-call]
        return torch.cat((chunks_HC.repeat_interleave(self.chunk, 1)[:, :n], sums_HN[:, n:]), 1)

    def default_recent(self, tokens: int, sinks: int) -> int:
        return self.window
