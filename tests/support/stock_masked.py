"""Transformers' own eager layers over a full cache, evicted tokens masked out layer by layer; it knows no store and no attention of ours.

Every layer gets a mask of its own in place of the library's: causal, windows, chunks, and the kept set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from harness.kv.compat import decoder_of, forward
from harness.kv.shape import LayerShape
from tests.support.masked_reference import Kept
from tests.support.softmax_models import make


@dataclass(frozen=True)
class Rule:
    """Which keys a layer's queries see by its own rule."""

    window: int | None
    chunked: bool
    full: bool  # whether the kept set applies

    def allowed(self, at_L1: Tensor, key_N: Tensor) -> Tensor:
        seen = key_N <= at_L1
        if self.window is not None:
            seen &= (key_N // self.window == at_L1 // self.window) if self.chunked else key_N > at_L1 - self.window
        return seen


def rules(config: PretrainedConfig, shape: Sequence[LayerShape]) -> list[Rule]:
    found = [Rule(one.window, one.chunked, one.window is None) for one in shape]
    if config.model_type == "gpt_neo":  # local layers cache everything and see a window
        local = [kind == "local" for kind in config.attention_layers]
        found = [Rule(config.window_size if near else None, False, True) for near in local]
    return found


class StockMasked:
    """A stock model that keeps everything, each layer read through its mask. weights: of the last forward, [Q, L, N] a layer."""

    def __init__(self, config: PretrainedConfig, shape: Sequence[LayerShape]) -> None:
        self.model: PreTrainedModel = make(config, "eager")
        self.rules, self.cache, self.seen = rules(config, shape), DynamicCache(), 0
        self.weights: list[Tensor] = []
        self._masks: list[Tensor] = []
        decoder = decoder_of(self.model)
        blocks = next(found for name in ("layers", "h", "blocks") if (found := getattr(decoder, name, None)) is not None)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _, args, kwargs, i=i: self._masked(i, args, kwargs), with_kwargs=True)
            for name, module in block.named_modules():
                if type(module).__name__.endswith("Attention") and name.count(".") <= 1 and not list(_inner(module)):
                    module.register_forward_hook(lambda _, __, out: self._weigh(out[1]))

    def _weigh(self, weights: Tensor | None) -> None:
        if weights is not None:
            self.weights.append(weights[0].detach())

    def _masked(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        allowed = self._masks[i]
        kind = self.model.config.model_type
        mask = ~allowed if kind == "mpt" else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        if "attention_mask" in kwargs:
            return args, kwargs | {"attention_mask": mask}
        return (args[0], mask, *args[2:]), kwargs

    def feed(self, tokens: Sequence[int], kept: Kept | None) -> Tensor:
        """Last logits [V] after new tokens that read the kept tokens (None: all) and each other."""
        new, n = len(tokens), self.seen + len(tokens)
        at, key, config = torch.arange(self.seen, n)[:, None], torch.arange(n), self.model.config
        heads = 1 if config.model_type == "xglm" else config.num_attention_heads
        self._masks, self.weights = [], []
        for i, rule in enumerate(self.rules):
            allowed_QLN = rule.allowed(at, key).repeat(heads, 1, 1)
            if kept is not None and rule.full:
                for h in range(heads):
                    old = key >= self.seen
                    old[kept[i][h * len(kept[i]) // heads].long()] = True
                    allowed_QLN[h] &= old
            self._masks.append(allowed_QLN[None])
        with torch.inference_mode():
            logits = forward(self.model, torch.tensor([list(tokens)]), at.T, self.cache, torch.tensor([-1]))
        self.seen = n
        return logits[0, -1] if logits.shape[1] == new else logits[0, 0]


def _inner(module: torch.nn.Module) -> list[str]:
    """Attention modules inside an attention module (gpt_neo wraps its own)."""
    return [name for name, one in module.named_modules() if name and "Attention" in type(one).__name__]
