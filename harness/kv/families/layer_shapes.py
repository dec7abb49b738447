"""The shape of each attention layer from a configuration, where layers of one model differ: head sizes, KV heads, windows; and
which layers store nothing because they read another layer's store.
"""

from __future__ import annotations

from typing import Any

from harness.kv.shape import Expanded, LayerShape

REUSE = "reuse"  # transformers' word for a layer that reads the store of an earlier one


def layer_settings(text: Any, layers: int) -> list[Any]:
    """The settings of each of a decoder's layers: its configuration, with what differs by layer replaced."""
    return list(getattr(text, "per_layer_config", None) or [text] * layers)


def layer_shape(one: Any, window: int | None, kind: str = "") -> LayerShape:
    """The shape of a layer from its settings; window: None for full attention. kind: its name in the configuration.

    Sliding layers have names of their own in some families (`swa_...`).
    """

    def setting(*names: str) -> int | None:
        own = [f"swa_{name}" for name in names] if window is not None else []
        return next((int(found) for name in (*own, *names) if (found := getattr(one, name, None))), None)

    queries = setting("num_attention_heads") or 1
    latent, rope = setting("kv_lora_rank"), setting("qk_rope_head_dim") or 0
    if latent is not None:  # `d_c + d_r` numbers a token, whatever the version of transformers stores
        read = Expanded(queries, (setting("qk_nope_head_dim") or 0) + rope, setting("v_head_dim") or 0)
        return LayerShape(1, rope, latent, window, expanded=read)
    heads, dim = setting("num_key_value_heads") or queries, setting("head_dim") or one.hidden_size // queries
    if window is not None and one.model_type == "mimo_v2_flash":
        heads *= 2  # written in its code, in no setting
    if one.model_type == "falcon":  # its newer kind repeats KV heads for every query head before it caches them
        heads = queries if one.new_decoder_architecture or not one.multi_query else 1
    return LayerShape(heads, dim, setting("v_head_dim") or dim, window, kind == "chunked_attention")


def readers(text: Any) -> dict[int, int]:
    """For each layer that stores nothing, by its number, the number of the layer whose store it reads.

    That is the last layer of the same type that stores.
    """
    modes = getattr(text, "kv_sharing_modes", None) or ()
    last: dict[str, int] = {}
    found = {}
    for number, (mode, kind) in enumerate(zip(modes, text.layer_types if modes else (), strict=True)):
        if mode == REUSE:
            found[number] = last[kind]
        else:
            last[kind] = number
    return found
