"""The designs: transformers configurations of one size that differ in what their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.qwen2 import Qwen2Config

LAYERS, WIDTH, HEADS, HEAD_DIM, WINDOW = 4, 64, 4, 16, 16
MLP_OF_MHA = 128  # all other designs get the MLP that makes them as large
POSITIONS = 1024
SLIDING, FULL = "sliding_attention", "full_attention"
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": HEAD_DIM, "q_lora_rank": None}
COMMON = {
    "vocab_size": 258,  # 256 bytes, BOS, EOS
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.05,
    "dtype": "float32",
}
ROTATION = {"rope_type": "default", "rope_theta": 10_000.0}

Make = Callable[[int], PretrainedConfig]


def _qwen2(kv_heads: int, kinds: list[str]) -> Make:
    window = WINDOW if SLIDING in kinds else None
    return lambda mlp: Qwen2Config(
        **COMMON,
        intermediate_size=mlp,
        num_key_value_heads=kv_heads,
        layer_types=kinds,
        rope_parameters=ROTATION,
        use_sliding_window=window is not None,
        sliding_window=window,
    )


def _latent(mlp: int) -> PretrainedConfig:
    """Every layer dense: `first_k_dense_replace` is the number of layers."""
    return DeepseekV3Config(
        **COMMON,
        **LATENT,
        intermediate_size=mlp,
        num_key_value_heads=HEADS,
        first_k_dense_replace=LAYERS,
        rope_parameters=ROTATION,
    )


def _gemma4(shared: int) -> Make:
    """The last `shared` layers read the store of the last layer before them; no per-layer inputs, plain rotation."""
    return lambda mlp: Gemma4TextConfig(
        **COMMON,
        intermediate_size=mlp,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        global_head_dim=HEAD_DIM,
        hidden_size_per_layer_input=0,
        layer_types=[FULL] * LAYERS,
        num_kv_shared_layers=shared,
        rope_parameters={SLIDING: ROTATION, FULL: ROTATION},
    )


DESIGNS: Mapping[str, Make] = {
    "MHA": _qwen2(HEADS, [FULL] * LAYERS),
    "GQA": _qwen2(HEADS // 2, [FULL] * LAYERS),
    "MQA": _qwen2(1, [FULL] * LAYERS),
    "MLA": _latent,
    "shared layers": _gemma4(LAYERS // 2),
    "window": _qwen2(HEADS, [SLIDING] * LAYERS),
    "window + global": _qwen2(HEADS, [SLIDING] * (LAYERS - 1) + [FULL]),
}


def size(config: PretrainedConfig) -> int:
    """Parameters of a model, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(one.numel() for one in model.parameters())


def configuration(design: str) -> PretrainedConfig:
    """The design's configuration, with the MLP whose model is nearest in size to that of plain multi-head attention."""
    make, wanted = DESIGNS[design], size(DESIGNS["MHA"](MLP_OF_MHA))
    least = size(make(1))
    step = size(make(2)) - least
    return make(1 + round((wanted - least) / step))


def described(config: PretrainedConfig) -> dict[str, Any]:
    """What a trained model is known by: its configuration without the library's version."""
    return {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
