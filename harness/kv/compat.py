"""Everything that depends on the version of transformers (5.2 to 5.x): configurations, the cache class, one forward.

What changed within 5.x (argument names, mask sizes) is handled here and nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from harness.errors import UserError
from harness.kv.shape import LayerShape, ModelShape

FEATURES = {  # settings of a decoder that change what is cached or attended to, and why they are refused
    "kv_lora_rank": "latent attention caches are not measured yet",
    "use_bidirectional_attention": "attention to later tokens is not implemented",
    "is_encoder_decoder": "encoder-decoders are not implemented",
}
FAMILIES = {  # model types that no setting identifies, and why they are refused
    "diffllama": "its layers attend twice",
    "doge": "it drops tokens by a learned mask of its own",
    "hrm_text": "its layers run several times, each time with another cache",
    "jetmoe": "its cached heads are not those of its configuration",
    "moshi": "its attention sees another window than its cache",
    "openai-gpt": "it keeps no cache: every token is computed again at every step",
}
OWN_ATTENTION = ("bloom", "falcon", "gpt_neo", "mpt", "xglm")  # model types that `families.own_attention` knows
RECURRENT = "linear attention and recurrent states are not measured"


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Shape of a decoder's KV cache, taken from the cache that transformers would build for it.

    Raises UserError, with the reason, for models whose cache or attention is not supported.
    """
    text = config.get_text_config(decoder=True)
    try:
        why = _unsupported(config, text) or _uncounted(config, text)
        found = None if why else _shape(config, text)
    except Exception as error:  # configurations differ by family: what cannot be read is not supported
        why, found = f"its cache cannot be read off its configuration ({type(error).__name__})", None
    if found is None:
        raise UserError(f"model type {getattr(text, 'model_type', '?')!r} is not supported: {why}")
    return found


def _shape(config: PretrainedConfig, text: PretrainedConfig) -> ModelShape:
    query_heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    layers = DynamicCache(config=config).layers
    windows = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    d_value = text.v_head_dim if text.model_type == "mimo_v2_flash" else dim
    shapes = [
        LayerShape(_heads(text, window), dim, d_value, window, kind == "chunked_attention")
        for window, kind in zip(windows, kinds, strict=True)
    ]
    return ModelShape(tuple(shapes), query_heads)


def _heads(text: PretrainedConfig, window: int | None) -> int:
    """KV heads that a layer caches."""
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if text.model_type == "falcon":  # its newer kind repeats KV heads for every query head before it caches them
        return heads if text.new_decoder_architecture or not text.multi_query else 1
    return 2 * heads if text.model_type == "mimo_v2_flash" and window is not None else heads


def _uncounted(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Why a model's cache cannot be counted, or None."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if any(getattr(model, "_is_stateful", False) for model in _classes(config)):
        return RECURRENT
    layers = DynamicCache(config=config).layers
    odd = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if any("Linear" in name for name in odd):
        return RECURRENT
    if "DummyLayer" in odd or len(layers) != text.num_hidden_layers:
        return "some of its layers share another layer's cache"
    if kinds or odd:
        return f"it has layers of other kinds: {', '.join(sorted(kinds | odd))}"
    return None


def _classes(config: PretrainedConfig) -> tuple[Any, ...]:
    """The model classes that a configuration is loaded into."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def _unsupported(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Why a model's attention is not supported, or None; from its configuration and class alone, before weights are loaded."""
    for name, why in FEATURES.items():
        if getattr(text, name, None):
            return why
    kind = getattr(text, "model_type", "")
    if kind in FAMILIES:
        return FAMILIES[kind]
    if not (kind in OWN_ATTENTION or all(map(_uses_interface, _classes(config)))):
        return "its layers compute attention themselves, where transformers' attention interface does not reach"
    if hasattr(text, "add_cross_attention") and not getattr(text, "is_decoder", True):
        return "it is an encoder, which attends to later tokens"
    return None


def _uses_interface(model: Any) -> bool:
    """Whether a model class lets an attention function of our own compute its attention."""
    return bool(getattr(model, "_supports_sdpa", True) or getattr(model, "_supports_attention_backend", False))


def decoder_of(model: PreTrainedModel) -> Any:
    """The module that holds a model's layers and its rotary embedding; llama4 gives its head for it."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model and hasattr(model, "model") else decoder


def layer_devices(model: PreTrainedModel, n_layers: int) -> list[torch.device]:
    """Device of each layer's weights, which is where its keys and values are stored too."""
    decoder = decoder_of(model)
    blocks = getattr(decoder, "layers", None) or getattr(decoder, "h", None) or getattr(decoder, "blocks", None) or []
    if len(blocks) != n_layers:
        return [model.device] * n_layers
    return [next(block.parameters()).device for block in blocks]


class EntryCache(Cache):  # type: ignore[misc]  # transformers has no types we can check
    """The cache that transformers sees: it returns new keys and values as they are, and stores nothing.

    The attention function rounds them to the cache dtype, and reads what sequence caches store.
    """

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(n_layers)])

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def forward(model: PreTrainedModel, ids_BL: Tensor, positions_BL: Tensor, cache: Cache, logits: Tensor | slice) -> Tensor:
    """One forward of ids [B, L] at given positions; logits [B, L', V] at these token indices, slice(None) for all."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    kwargs: dict[str, Any] = {name: cache, "use_cache": True, "logits_to_keep": 0 if isinstance(logits, slice) else logits}
    out: Tensor = model(input_ids=ids_BL, position_ids=positions_BL, **kwargs).logits
    return out
