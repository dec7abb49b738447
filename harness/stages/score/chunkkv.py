"""Whole chunks of neighbouring rows that the last queries look at; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Scorer):
    """ChunkKV (arXiv 2502.00299): rows before the window in chunks of `chunk`; all rows of a chunk get its summed attention.

    Attention of the last `window` queries, mean over a query group, summed over the window and the chunk, per KV head. The
    best chunks stay whole; the last one chosen is cut to its first rows where the budget ends. The last chunk before the
    window may be shorter, and has the smaller sum. The paper's chunk is 10; its sharing of indices between layers is left out.
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
