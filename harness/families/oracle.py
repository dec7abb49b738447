"""A full cache whose evicted tokens are masked out, in any family: the family's own eager attention with one more mask.

What a compressed cache must equal. It knows no stack and no store of ours.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from harness.families.tiny import build
from harness.kv.compat import OWN_ATTENTION

NAME = "masked_own"
Kept = Sequence[Sequence[Tensor]]  # for every layer of the model and KV head: original positions that may be read
_KEPT: ContextVar[dict[int, Sequence[Tensor]]] = ContextVar("masked_own")


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    """The attention function that a model's own file has; query [B, Q, L, D], key and value of every token seen."""
    layer = int(getattr(module, "layer_idx", -1) or 0)
    own: Callable[..., Any] = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    kept = _KEPT.get().get(layer)
    if kept is not None:
        attention_mask = _hidden(kept, query, key, attention_mask)
    return own(module, query, key, value, attention_mask, *args, **kwargs)


def _hidden(kept: Sequence[Tensor], query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The model's own mask with every old token hidden that a head does not keep, [1, Q, L, N]."""
    (_, q, length, _), n = query.shape, key.shape[2]
    hidden_HN = torch.ones(len(kept), n, dtype=torch.bool, device=query.device)
    for head, positions in enumerate(kept):
        hidden_HN[head, positions.long()] = False
    hidden_HN[:, n - length :] = False
    least = torch.finfo(query.dtype).min
    if mask is None:
        mask = torch.zeros(1, 1, length, n, dtype=query.dtype, device=query.device)
    return (
        mask[..., :n].expand(1, q, length, n).masked_fill(hidden_HN.repeat_interleave(q // len(kept), 0)[None, :, None], least)
    )


def alone(model: PreTrainedModel, tokens: Sequence[int], seen: int, cache: Cache | None) -> tuple[Tensor, Cache]:
    """(last logits [V], cache) of a model after new tokens, as its users call it: its own cache, made by itself at first."""
    parameters = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    if "position_ids" in parameters:
        given["position_ids"] = torch.arange(seen, seen + len(tokens))[None]
    if "logits_to_keep" in parameters:  # one row of logits is another product than the same row among others
        given["logits_to_keep"] = torch.tensor([-1])
    out = model(input_ids=torch.tensor([list(tokens)]), **given)
    found = getattr(out, "cache", None) or getattr(out, "past_key_values", None)
    if found is None:
        raise ValueError("it gives back no cache")
    return out.logits[0, -1], found


def _hide(layer: int, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a block that attends by itself, the kept set in its mask: additive, or bool where True hides (mpt)."""
    kept = _KEPT.get().get(layer)
    if kept is None:
        return args, kwargs
    assert all(torch.equal(kept[0], one) for one in kept), "these blocks take one mask for all heads"
    mask = kwargs["attention_mask"] if "attention_mask" in kwargs else args[1]
    hidden_N = torch.ones(mask.shape[-1], dtype=torch.bool)
    hidden_N[kept[0].long()] = False
    hidden_N[mask.shape[-1] - mask.shape[-2] :] = False
    mask = mask | hidden_N if mask.dtype == torch.bool else mask.masked_fill(hidden_N, torch.finfo(mask.dtype).min)
    if "attention_mask" in kwargs:
        return args, kwargs | {"attention_mask": mask}
    return (args[0], mask, *args[2:]), kwargs


def by_head(config: PretrainedConfig) -> bool:
    """Whether each head of a family can have a mask of its own."""
    return config.get_text_config(decoder=True).model_type not in OWN_ATTENTION


def masked_model(config: PretrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model of a family that hides what the current kept set lacks."""
    if by_head(config):
        return build(config, NAME, weights)
    model = build(config, "eager", weights)
    decoder = model.get_decoder()
    blocks = next(found for name in ("layers", "h", "blocks") if (found := getattr(decoder, name, None)) is not None)
    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(_hide, layer), with_kwargs=True)
    return model


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)


class MaskedModel:
    """A model and its own cache that keeps everything, read through a mask; made by `masked_model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.seen = model, 0
        self.cache: Cache | None = None

    def feed(self, tokens: Sequence[int], kept: dict[int, Sequence[Tensor]]) -> Tensor:
        """Last logits [V] after new tokens that read each other and, in the layers of `kept`, the tokens kept there."""
        token = _KEPT.set(kept)
        try:
            logits, self.cache = alone(self.model, tokens, self.seen, self.cache)
        finally:
            _KEPT.reset(token)
        self.seen += len(tokens)
        return logits
