"""Tiny random models of families whose attention is not plain softmax over every token, and the library's own attention for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from tests.support.tiny_models import SHAPE, WINDOW, build

TINY = SHAPE | {"num_key_value_heads": 2}
ALTERNATE = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
CAPPED = {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "initializer_range": 0.12}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEADS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.05}


@dataclass(frozen=True)
class Family:
    """A configuration, and which of transformers' own attentions it is compared with."""

    kind: str  # class of the configuration
    settings: dict[str, Any]
    stock: str = "eager"  # the default of the library for this family
    full: tuple[int, ...] = (0, 1, 2)  # layers that stacks compress

    def config(self, **changes: Any) -> PretrainedConfig:
        """Skipped where this version of transformers has no such family."""
        if not hasattr(transformers, self.kind):
            pytest.skip(f"transformers {transformers.__version__} has no {self.kind}")
        found: PretrainedConfig = getattr(transformers, self.kind)(**(self.settings | changes))
        return found


def _falcon(**more: Any) -> Family:
    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1024}
    return Family("FalconConfig", HEADS | shape | more, "sdpa")


LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "floor_scale": 16,
    "attn_scale": 0.5,
}
FAMILIES: dict[str, Family] = {
    "gpt_oss": Family("GptOssConfig", TINY | ALTERNATE | EXPERTS | {"head_dim": 32}, full=(1, 3)),
    "granite_swa": Family("GraniteSWAConfig", TINY | ALTERNATE | {"attention_multiplier": 0.18}, full=(1, 3)),
    "granitemoe_swa": Family("GraniteMoeSWAConfig", TINY | ALTERNATE | EXPERTS | {"attention_multiplier": 0.18}, full=(1, 3)),
    "mimo_v2_flash": Family(
        "MiMoV2FlashConfig",
        TINY
        | ALTERNATE
        | {"head_dim": 32, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        full=(1, 3),
    ),
    "gemma2": Family("Gemma2Config", TINY | ALTERNATE | CAPPED, full=(1, 3)),
    "vaultgemma": Family("VaultGemmaConfig", TINY | ALTERNATE | CAPPED, full=(1, 3)),
    "llama4": Family("Llama4TextConfig", TINY | LLAMA4, "sdpa", (3,)),
    "bloom": Family("BloomConfig", HEADS | {"hidden_size": 128, "n_layer": 3, "n_head": 4}),
    "mpt": Family("MptConfig", HEADS | {"d_model": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": 1024}),
    "falcon, alibi": _falcon(alibi=True, multi_query=False),
    "falcon, one KV head": _falcon(),
    "falcon, repeated heads": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "gpt_neo": Family(
        "GPTNeoConfig",
        HEADS
        | {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 1024}
        | {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        full=(0, 1, 2, 3),
    ),
    "xglm": Family(
        "XGLMConfig",
        HEADS | {"d_model": 128, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 1024},
    ),
    "phi3": Family("Phi3Config", TINY | {"sliding_window": WINDOW}, "sdpa", ()),
    "starcoder2": Family("Starcoder2Config", TINY | {"sliding_window": WINDOW}, "sdpa", ()),
}


def make(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose learned sinks are not all alike, so that a head that takes another's is noticed."""
    model = build(config, attention, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.data.copy_(torch.randn(weight.shape))
    return model


@lru_cache(maxsize=4)
def engine(name: str) -> Engine:
    """Engine on a tiny fp32 model of a family, read-only."""
    return Engine(make(FAMILIES[name].config(), NAME), torch.float32)
