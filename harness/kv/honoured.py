"""Checks that a model's attention is one that `harness.kv.attention` implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.shape import LayerShape

# Keyword arguments that our attention implements, or that do not matter to it. Others are refused, not ignored.
HONOURED = ("dropout", "is_causal", "sliding_window", "position_ids", "cache", "use_cache")


def check(
    module: torch.nn.Module, expected: LayerShape, key: Tensor, value: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
) -> None:
    """UserError if a layer's attention or cache shape is not the one expected from the model's configuration."""
    layer = module.layer_idx
    given = (name for name, setting in settings.items() if setting is not None and not name.startswith("output_"))
    odd = sorted(set(given) - set(HONOURED))
    refuse(bool(odd), f"its attention uses {', '.join(odd)}")
    refuse(mask is not None, "it makes attention masks of its own")
    causal = settings.get("is_causal")
    refuse((getattr(module, "is_causal", True) if causal is None else causal) is False, "its attention is not causal")
    sliding, window = settings.get("sliding_window"), expected.window
    cached = "no window" if window is None else f"a window of {window}"
    refuse(sliding is not None and sliding != window, f"layer {layer} has a window of {sliding}, its cache {cached}")
    found, configured = (key.shape[1], key.shape[3], value.shape[3]), expected.attended
    refuse(
        found != configured, f"layer {layer} has (KV heads, key dim, value dim) {found}, its configuration says {configured}"
    )


def refuse(when: bool, reason: str) -> None:
    """UserError with the reason, if `when`."""
    if when:
        raise UserError(f"this model is not supported: {reason}")
