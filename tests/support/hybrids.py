"""Tiny random models of every hybrid family: layers with recurrent or convolution states beside layers that attend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.compat import STATES
from tests.support.tiny_models import SHAPE, build

LINEAR, FULL = "linear_attention", "full_attention"
TINY = SHAPE | {"num_key_value_heads": 2, "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
DELTA = {  # gated delta rule
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
CONV = {"layer_types": ["conv", FULL, "conv", FULL]}


def config(kind: str, **settings: Any) -> PretrainedConfig:
    """A config class of transformers by its name; skipped where this version has none."""
    if not hasattr(transformers, kind) or not STATES:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}, or no kind of cache layer for all states")
    found: PretrainedConfig = getattr(transformers, kind)(**{k: v for k, v in (TINY | settings).items() if v is not None})
    return found


HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_next": lambda: config("Qwen3NextConfig", **DELTA, **EXPERTS),
    "qwen3_5": lambda: config("Qwen3_5TextConfig", **DELTA),
    "qwen3_5_moe": lambda: config("Qwen3_5MoeTextConfig", **DELTA, **EXPERTS),
    "olmo_hybrid": lambda: config(
        "OlmoHybridConfig", **(DELTA | {"head_dim": None}), rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    "jamba": lambda: config(
        "JambaConfig",
        layer_types=None,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": lambda: config("BambaConfig", layer_types=None, attn_layer_indices=[1, 3], **MAMBA),
    "granitemoehybrid": lambda: config("GraniteMoeHybridConfig", **MAMBA, **EXPERTS),
    "nemotron_h": lambda: config(
        "NemotronHConfig",
        **EXPERTS,
        layer_types=[LINEAR, FULL, "mlp", LINEAR, FULL],
        num_hidden_layers=5,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
    ),
    "falcon_h1": lambda: config("FalconH1Config", **MAMBA, mamba_d_ssm=256, layer_types=None),
    "lfm2": lambda: config("Lfm2Config", **CONV),
    "lfm2_moe": lambda: config("Lfm2MoeConfig", **CONV, **EXPERTS, num_dense_layers=1),
    "lfm3": lambda: config(
        "Lfm3Config", layer_types=["conv", "sliding_attention", "conv", FULL], sliding_window=16, head_dim=32
    ),
    "minimax": lambda: config("MiniMaxConfig", num_local_experts=4, block_size=16, head_dim=32),
}
REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "states in the layers, recurrent_gemma": (
        lambda: transformers.RecurrentGemmaConfig(),
        "keep their recurrent states themselves",
    ),
    "shared attention, zamba": (lambda: transformers.ZambaConfig(), "share blocks of attention"),
    "shared attention, zamba2": (lambda: transformers.Zamba2Config(), "share blocks of attention"),
    "no layer attends, mamba2": (lambda: transformers.Mamba2Config(), "no layer of it attends"),
    "an index cache, qwen4_exp": (
        lambda: config("Qwen4ExpTextConfig", layer_types=[LINEAR, "indexed_attention"] * 2),
        "keys of an index",
    ),
}


@lru_cache(maxsize=4)
def model(family: str, attn: str = "sdpa") -> PreTrainedModel:
    """A model of a family; the same weights whatever its attention."""
    return build(HYBRIDS[family](), attn)


def engine(family: str, *, invariant: bool = False) -> Engine:
    """An engine with an fp32 cache."""
    return Engine(model(family, NAME), torch.float32, invariant=invariant)


def stock_cache(family: str) -> Cache:
    """The cache that the model itself would make."""
    found = model(family)
    own = [x for x in vars(sys.modules[type(found.get_decoder()).__module__]).values() if isinstance(x, type)]
    for kind in own:
        if issubclass(kind, DynamicCache) and kind is not DynamicCache:
            return kind()
    return DynamicCache(config=found.config)


def states(cache: Cache) -> list[Tensor]:
    """The states that transformers' cache holds [1, ...]; those of one shape and dtype follow one another."""
    found: dict[object, list[Tensor]] = {}
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            for x in (getattr(layer, name, None) or {}).values():
                if x is not None:
                    found.setdefault((x.shape, x.dtype), []).append(x)
    return [x for alike in found.values() for x in alike] + [x for x in getattr(cache, "linear_cache", []) if len(x)]


def stored(cache: Cache) -> list[Tensor]:
    """The keys and values that transformers' cache holds, [1, H, N, D]."""
    both = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return [x for x in both if x is not None]


def by_number(engine: Engine, of_layers: Sequence[Any], layers: int) -> list[Any]:
    """What is known of the layers that attend, by their numbers in the model; None for others."""
    known = dict(zip(engine.shape.of_model(range(len(engine.shape.layers))), of_layers, strict=True))
    return [known.get(number) for number in range(layers)]
