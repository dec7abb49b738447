"""Tiny models with latent attention of every family that this version of transformers has; they know no stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PretrainedConfig

from tests.support.tiny_models import SHAPE

D_C, D_R, HEADS = 64, 32, 4
LATENT = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": D_C,
    "qk_rope_head_dim": D_R,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "q_lora_rank": 48,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MINI = {"hidden_size": 128, "scale_emb": 1, "dim_model_base": 128, "scale_depth": 1.4}
LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "head_dim": D_R,
}


def _config(kind: str, **settings: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, kind)(**(SHAPE | LATENT | settings))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}


FOUND: dict[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "deepseek_v2": ("DeepseekV2Config", _config("DeepseekV2Config", **EXPERTS)),
    "deepseek_v2, one query projection": ("DeepseekV2Config", _config("DeepseekV2Config", **EXPERTS, q_lora_rank=None)),
    "deepseek_v3": ("DeepseekV3Config", _config("DeepseekV3Config", **EXPERTS, n_shared_experts=1)),
    "deepseek_v3, halves": ("DeepseekV3Config", _config("DeepseekV3Config", **EXPERTS, rope_interleave=False)),
    "deepseek_v3, yarn": ("DeepseekV3Config", _config("DeepseekV3Config", **EXPERTS, rope_parameters=YARN)),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _config("Glm4MoeLiteConfig", **EXPERTS)),
    "youtu": ("YoutuConfig", _config("YoutuConfig")),
    "minicpm3": ("MiniCPM3Config", _config("MiniCPM3Config", **MINI)),
    "longcat_flash": ("LongcatFlashConfig", _config("LongcatFlashConfig", **LONGCAT)),
    "sarvam_mla": ("SarvamMLAConfig", _config("SarvamMLAConfig", **EXPERTS)),
    "axk1": ("AXK1Config", _config("AXK1Config", **EXPERTS)),
}
FAMILIES = {name: make for name, (kind, make) in FOUND.items() if hasattr(transformers, kind)}
