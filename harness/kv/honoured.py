"""Checks that a model's attention is one that `harness.kv.attention` implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.kv.shape import LayerShape, ModelShape
from harness.stages.softmax import PLAIN, Softmax

SOFTMAX = {"cap": "softcap", "sinks_Q": "s_aux", "alibi": "alibi", "sees": "sees"}  # fields of `Softmax`: names in a call
NAMES = frozenset(SOFTMAX.values())
# Keyword arguments that our attention implements, or that do not matter to it. Others are refused, not ignored.
HONOURED = {"dropout", "is_causal", "sliding_window", "position_ids", "cache", "use_cache", "logits_to_keep", *NAMES}


def check(
    module: torch.nn.Module, expected: LayerShape, key: Tensor, value: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
) -> None:
    """UserError if a layer's attention or cache shape is not the one expected from the model's configuration."""
    layer = module.layer_idx
    if not settings.keys() <= HONOURED and (odd := _odd(settings)):
        raise unsupported(f"its attention uses {', '.join(odd)}")
    if mask is not None:
        raise unsupported("it makes attention masks of its own")
    causal = settings.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise unsupported("its attention is not causal")
    sliding, window = settings.get("sliding_window"), expected.window
    if sliding is not None and sliding != window:
        cached = "no window" if window is None else f"a window of {window}"
        raise unsupported(f"layer {layer} has a window of {sliding}, its cache {cached}")
    found, configured = (key.shape[1], key.shape[3], value.shape[3]), expected.attended
    if found != configured:
        sizes = f"(KV heads, key dim, value dim) {found}, its configuration says {configured}"
        raise unsupported(f"layer {layer} has {sizes}")


def _odd(settings: Mapping[str, Any]) -> list[str]:
    """The settings of a call that are not honoured."""
    given = (name for name, one in settings.items() if one is not None)
    return sorted(name for name in given if name not in HONOURED and not name.startswith("output_"))


def layer_of(module: torch.nn.Module) -> int:
    """The number of an attention module's layer in the model; UserError for one that several layers share (zamba)."""
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or number < 0:
        raise unsupported("several of its layers share one attention, which does not know whose it is")
    return number


def softmax_of(settings: dict[str, Any]) -> tuple[Softmax, dict[str, Any]]:
    """(the softmax that an attention call asks for, the settings left for sdpa).

    softcap and s_aux are transformers' names (gemma2, gpt_oss); alibi and sees come from `own_attention`.
    """
    if NAMES.isdisjoint(settings):
        return PLAIN, settings
    left = dict(settings)
    found = {field: left.pop(name, None) for field, name in SOFTMAX.items()}
    return Softmax(**found) if any(x is not None for x in found.values()) else PLAIN, left


def no_gradients(shape: ModelShape) -> str | None:
    """Why the gradients of a model's keys and values cannot be asked for, or None."""
    if shape.hybrid:
        return "its recurrent layers change their states in place"
    if any(layer.expanded for layer in shape.layers):
        return "it stores latents"
    return "some of its layers read another layer's store" if shape.readers else None


def no_moments(model: PreTrainedModel) -> str | None:
    """Why the attention of future queries cannot be predicted from their mean and covariance, or None."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None):
        return "its scores are soft-capped, and the mean of exp(cap * tanh(s / cap)) over Gaussian queries has no closed form"
    if config.model_type == "gpt_neo" and "local" in config.attention_layers:
        return "its local layers cache tokens that no future query of them sees"
    if getattr(config, "attn_temperature_tuning", None):
        return "its queries are scaled by their positions"
    return None


def unsupported(reason: str) -> UserError:
    """The refusal of a model, for this reason."""
    return UserError(f"this model is not supported: {reason}")
