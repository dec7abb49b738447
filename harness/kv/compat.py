"""Everything that depends on the version of transformers (5.2 to 5.x): configurations, the cache class, one forward.

What changed within 5.x (argument names, mask sizes) is handled here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel, __version__, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from harness.errors import UserError
from harness.kv.families.layer_shapes import layer_settings, layer_shape, readers
from harness.kv.families.position_tables import TABLED
from harness.kv.shape import ModelShape

FEATURES = {  # settings of a decoder that change what is cached or attended to, and why they are refused
    "index_topk": "it attends to tokens chosen by an indexer, whose own cached keys are not measured",
    "use_bidirectional_attention": "attention to later tokens is not implemented",
    "cross_attention_layers": "some of its layers attend to images, and to nothing where there are none",
    "is_encoder_decoder": "encoder-decoders are not implemented",
}
FAMILIES = {  # model types that no setting identifies, and why they are refused
    "blt": "it reads patches of bytes through three models, each with a cache of its own",
    "diffllama": "its layers attend twice",
    "doge": "it drops tokens by a learned mask of its own",
    "hrm_text": "its layers run several times, each time with another cache",
    "jetmoe": "its cached heads are not those of its configuration",
    "moshi": "its attention sees another window than its cache",
    "recurrent_gemma": "its layers keep their recurrent states themselves, not in a cache that could be forked",
    "zamba": "its layers share blocks of attention that do not say for which layer they attend",
    "zamba2": "its layers share blocks of attention that do not say for which layer they attend",
    "openai-gpt": "it keeps no cache: every token is computed again at every step",
}
OWN_ATTENTION = ("bloom", "falcon", "gpt_neo", "mpt", "xglm")  # model types that `families.own_attention` knows
STATES: type | tuple[()] = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())  # layers with recurrent states
RECURRENT = {"linear_attention", "conv", "hybrid"}  # kinds of layers with states; in "hybrid" ones beside keys and values
NO_ATTENTION = "no layer of it attends: its cache does not grow, and there is nothing to compress"
INDEXED = (
    "its layers choose the tokens they attend to by keys of an index, each a mean over a block of neighbouring tokens: with "
    "one token evicted, every later one falls into another block, and tokens that stay are chosen by other keys"
)
KINDS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"} | RECURRENT


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
    layers = DynamicCache(config=config).layers
    attending = {i: layer for i, layer in enumerate(layers) if isinstance(layer, DynamicLayer)}
    windows = {
        i: layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for i, layer in attending.items()
    }
    settings = layer_settings(text, len(layers))
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    places = {number: at for at, number in enumerate(attending)}
    return ModelShape(
        tuple(layer_shape(settings[number], window, kinds[number]) for number, window in windows.items()),
        text.num_attention_heads,
        numbers=tuple(attending) if len(attending) < len(layers) else (),
        hybrid=any(isinstance(layer, STATES) for layer in layers),
        readers=tuple((number, places[owner]) for number, owner in readers(text).items()),
    )


def _uncounted(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Why a model's cache cannot be counted, or None."""
    layers, kinds = DynamicCache(config=config).layers, set(getattr(text, "layer_types", None) or ())
    stateful = bool(kinds & RECURRENT) or any(getattr(model, "_is_stateful", False) for model in _classes(config))
    if stateful and not any(isinstance(layer, STATES) for layer in layers):
        return f"transformers {__version__} keeps its recurrent states in a cache of its own kind; later versions may not"
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        return NO_ATTENTION
    shares = getattr(text, "num_kv_shared_layers", None) and not hasattr(text, "kv_sharing_modes")
    if shares or len(layers) != text.num_hidden_layers:
        return f"some of its layers share another layer's cache, and transformers {__version__} does not say which"
    if "indexed_attention" in kinds:
        return INDEXED
    plain = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    odd = {type(layer).__name__ for layer in layers if type(layer).__name__ not in plain and not isinstance(layer, STATES)}
    if odd | (kinds - KINDS):
        return f"it has layers of other kinds: {', '.join(sorted(odd | (kinds - KINDS)))}"
    return None


def _classes(config: PretrainedConfig) -> tuple[Any, ...]:
    """The model classes that a configuration is loaded into."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def _unsupported(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Why a model's attention is not supported, or None; from its configuration and class alone, before weights are loaded."""
    kind = getattr(text, "model_type", "")
    # "vision": images alone are attended to in both directions.
    odd = [why for name, why in FEATURES.items() if getattr(text, name, None) not in (None, False, 0, "vision")]
    if found := [why for why in (FAMILIES.get(kind), *odd) if why]:
        return found[0]
    stateful = any(getattr(model, "_is_stateful", False) for model in _classes(config))
    if stateful and not hasattr(text, "num_attention_heads"):
        return NO_ATTENTION
    if not (kind in OWN_ATTENTION or all(map(_uses_interface, _classes(config)))):
        return "its layers compute attention themselves, where transformers' attention interface does not reach"
    if hasattr(text, "add_cross_attention") and not getattr(text, "is_decoder", True):
        return "it is an encoder, which attends to later tokens"
    placed = kind in (*TABLED, *OWN_ATTENTION)
    if not placed and not all("position_ids" in inspect.signature(model.forward).parameters for model in _classes(config)):
        return "its forward takes no positions, so that sequences of a batch could not stand at places of their own"
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
    return [device_of(block) for block in blocks] if len(blocks) == n_layers else [device_of(decoder)] * n_layers


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module computes: where a device map sends its inputs, else where its weights are.

    Weights that a map leaves on the host or the disk are nowhere between two forwards.
    """
    hook = getattr(module, "_hf_hook", None)
    sent = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]
    known = [device for device in sent if device is not None]
    return torch.device(known[0]) if known else next(module.parameters()).device


class EntryCache(Cache):  # type: ignore[misc]  # transformers has no types we can check
    """The cache that transformers sees: it returns new keys and values as they are, and stores nothing.

    The attention function rounds them to the cache dtype, and reads what sequence caches store.
    """

    def __init__(self, layers: int | list[Any]) -> None:
        """layers: how many there are, or transformers' own, where some of them have states."""
        own = [DynamicLayer() for _ in range(layers)] if isinstance(layers, int) else layers
        Cache.__init__(self, layers=own)  # not that of a family's cache, where a subclass is one too

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@lru_cache
def cache_name(forward_of_class: Callable[..., Any]) -> str:
    """What the forward of a model's class calls the cache that it takes."""
    return "cache" if "cache" in inspect.signature(forward_of_class).parameters else "past_key_values"


def forward(
    model: PreTrainedModel, ids_BL: Tensor, positions_BL: Tensor, cache: Cache, logits: Sequence[int] | slice
) -> Tensor:
    """One forward of ids [B, L] at given positions; logits [B, L', V] at these token indices, slice(None) for all.

    The model gets the indices as numbers: its last hidden states may lie on another device than its ids. It never gets 0 for
    all of several tokens: Gemma 4 with shared stores and without per-layer inputs fails at that.
    """
    wanted: object = list(range(ids_BL.shape[1])) if isinstance(logits, slice) else [int(i) for i in logits]
    if ids_BL.shape[1] == 1:
        wanted = 1  # all that there is, without an index
    kwargs: dict[str, Any] = {cache_name(type(model).forward): cache, "use_cache": True, "logits_to_keep": wanted}
    out: Tensor = model(input_ids=ids_BL, position_ids=positions_BL, **kwargs).logits
    return out
