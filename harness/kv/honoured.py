"""What a model asks of its attention, held against what ours honours; it computes nothing and knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.shape import LayerShape

# Settings that our attention follows, or that change nothing of it. Unknown ones are refused, not passed over.
HONOURED = ("dropout", "is_causal", "sliding_window", "position_ids", "cache", "use_cache")


def check(
    module: torch.nn.Module, expected: LayerShape, key: Tensor, value: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
) -> None:
    """Refuse (UserError) a layer whose attention or cache is not what its model's configuration made us expect."""
    layer = module.layer_idx
    given = (name for name, setting in settings.items() if setting is not None and not name.startswith("output_"))
    odd = sorted(set(given) - set(HONOURED))
    refuse(bool(odd), f"its attention uses {', '.join(odd)}")
    refuse(mask is not None, "it makes attention masks of its own")
    causal = settings.get("is_causal")
    refuse((getattr(module, "is_causal", True) if causal is None else causal) is False, "its attention is not causal")
    sliding, window = settings.get("sliding_window"), expected.window
    wanted = "no window" if window is None else f"a window of {window}"
    refuse(sliding is not None and sliding != window, f"layer {layer} has a window of {sliding}, its cache {wanted}")
    found, told = (key.shape[1], key.shape[3], value.shape[3]), (expected.heads, expected.d_key, expected.d_value)
    refuse(found != told, f"layer {layer} has (KV heads, key dim, value dim) {found}, its configuration says {told}")


def refuse(when: bool, reason: str) -> None:
    """One line where `when` holds."""
    if when:
        raise UserError(f"this model is not supported: {reason}")
