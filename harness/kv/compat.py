"""The intersection of transformers 5.2 ... 5.x that we stand on; it knows no policy and no store.

Everything that drifted inside 5.x (argument names, mask sizes) is met here and nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from harness.kv.shape import LayerShape, ModelShape
from harness.types import UserError


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Cache shape of a decoder, read off the cache that transformers itself would build for it.

    Raises UserError for layers whose cache we could not count or honour (linear attention, shared or chunked layers, MLA,
    soft-capping).
    """
    text = config.get_text_config(decoder=True)
    kind = getattr(text, "model_type", "?")
    if getattr(text, "kv_lora_rank", None) or getattr(text, "attention_chunk_size", None):
        raise UserError(f"model type {kind!r} is not supported: latent or chunked attention caches are not measured yet")
    if getattr(text, "attn_logit_softcapping", None) or getattr(text, "is_encoder_decoder", False):
        raise UserError(f"model type {kind!r} is not supported: soft-capped attention and encoder-decoders are not honoured")
    layers = DynamicCache(config=config).layers
    if len(layers) != text.num_hidden_layers:
        raise UserError(f"model type {kind!r} is not supported: some of its layers share another layer's cache")
    query_heads = text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or query_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    shapes = []
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UserError(f"model type {kind!r} is not supported: a layer has a cache of type {type(layer).__name__}")
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        shapes.append(LayerShape(heads, dim, dim, window))
    return ModelShape(tuple(shapes), query_heads)


def layer_devices(model: PreTrainedModel, n_layers: int) -> list[torch.device]:
    """Where each layer's weights lie; a model spread over devices keeps each layer's rows on its own."""
    decoder = model.get_decoder()
    blocks = getattr(decoder, "layers", None) or getattr(decoder, "h", None) or []
    if len(blocks) != n_layers:
        return [model.device] * n_layers
    return [next(block.parameters()).device for block in blocks]


class EntryCache(Cache):  # type: ignore[misc]  # transformers has no types we can check
    """What transformers sees as its cache: it rounds new rows to the cache dtype and hands them on.

    The rows themselves live in our stores, which the attention function reads.
    """

    def __init__(self, n_layers: int, kv_dtype: torch.dtype) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(n_layers)])
        self.kv_dtype = kv_dtype

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.dtype == self.kv_dtype:
            return key_states, value_states
        k, v = (x.to(self.kv_dtype).to(x.dtype) for x in (key_states, value_states))
        return k, v


def forward(model: PreTrainedModel, ids_BL: Tensor, positions_BL: Tensor, cache: Cache, logits: Tensor | slice) -> Tensor:
    """One forward at given positions; logits [B, L', V] of the token indices asked for, slice(None) for all."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    kwargs: dict[str, Any] = {name: cache, "use_cache": True, "logits_to_keep": 0 if isinstance(logits, slice) else logits}
    out: Tensor = model(input_ids=ids_BL, position_ids=positions_BL, **kwargs).logits
    return out
