"""A full cache whose evicted tokens are masked out: what a compressed cache must equal; it knows no stack and no store of ours.

Plain softmax attention in float64 over all tokens ever seen, causal and sliding-window rules and the kept set as one mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from harness.kv.compat import forward

NAME = "masked_reference"
Kept = Sequence[Sequence[Tensor]]  # original positions that may be read, per layer and KV head
_CURRENT: ContextVar[tuple[Kept | None, list[int | None]]] = ContextVar("masked_reference")


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, Q, L, D]; key and value [1, H, N, D] of every token seen."""
    kept, windows = _CURRENT.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    (_, n_q, new, d), (_, h, n, _) = query.shape, key.shape
    at = torch.arange(n - new, n)[:, None]
    rows = torch.arange(n)[None]
    allowed_HLN = (rows <= at).repeat(h, 1, 1)
    window = windows[layer]
    if window is not None:
        allowed_HLN &= rows > at - window
    elif kept is not None:
        for head in range(h):
            old = torch.zeros(n, dtype=torch.bool)
            old[kept[layer][head].long()] = True
            old[n - new :] = True
            allowed_HLN[head] &= old
    scale = d**-0.5 if scaling is None else scaling
    k, v = (x[0].double().repeat_interleave(n_q // h, 0) for x in (key, value))
    scores = query[0].double() @ k.mT * scale
    weights = scores.masked_fill(~allowed_HLN.repeat_interleave(n_q // h, 0), -torch.inf).softmax(-1)
    return (weights @ v).to(query.dtype).transpose(0, 1)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask is built from the kept set."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)


def next_logits(model: PreTrainedModel, cache: DynamicCache, seen: int, tokens: Sequence[int]) -> Tensor:
    """Last logits [V] after tokens that follow the `seen` ones of a stock cache."""
    positions = torch.arange(seen, seen + len(tokens))[None]
    return forward(model, torch.tensor([list(tokens)]), positions, cache, torch.tensor([-1]))[0, 0]


class MaskedCache:
    """A stock cache that keeps everything, read through a mask."""

    def __init__(self, model: PreTrainedModel, windows: list[int | None]) -> None:
        assert model.config._attn_implementation == NAME
        self.model, self.windows, self.cache, self.seen = model, windows, DynamicCache(), 0

    def copy(self) -> MaskedCache:
        """One that has seen the same tokens; what it is fed from now on is its own."""
        other = MaskedCache(self.model, self.windows)
        other.cache, other.seen = copy.deepcopy(self.cache), self.seen
        return other

    def feed(self, tokens: Sequence[int], kept: Kept | None) -> Tensor:
        """Last logits [V] after new tokens that read the kept tokens (None: all) and each other."""
        token = _CURRENT.set((kept, self.windows))
        try:
            logits = next_logits(self.model, self.cache, self.seen, tokens)
        finally:
            _CURRENT.reset(token)
        self.seen += len(tokens)
        return logits
