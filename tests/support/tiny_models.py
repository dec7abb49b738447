"""Tiny models of every supported family with random weights, and prompts for them; they know no stack and no expectation."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from harness.engine.engine import Engine
from harness.kv.attention import NAME

VOCABULARY = 128
WINDOW = 16  # of the sliding layers: shorter than every prompt here
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "gpt2")

# Weights (std 0.05, gemma3 0.12) large enough that dropping a row moves the logits by a tenth or more, small enough that
# fp32 rounding alone, with nothing dropped, stays below 1e-6 of the largest logit.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config(family: str, kv_heads: int = 2) -> PretrainedConfig:
    """Config of a family with 4 query heads of 32 channels; gpt2 has as many KV heads as query heads, always."""
    shape = SHAPE | {"num_key_value_heads": kv_heads}
    if family == "gpt2":
        sizes = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024, "initializer_range": 0.05}
        return GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes)
    if family == "gemma3":  # five sliding layers and a global one
        more = {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "initializer_range": 0.12,
        }
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        return Gemma3TextConfig(**(shape | more), layer_types=kinds)
    makers: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**shape),
        "mistral": lambda: MistralConfig(**shape, sliding_window=WINDOW),
        "mistral_full": lambda: MistralConfig(**shape, sliding_window=None),
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=32),
        "phi3": lambda: Phi3Config(**shape),
    }
    found: PretrainedConfig = makers[family]()
    return found


def tiny_a(**changes: Any) -> PretrainedConfig:
    """TINY-A: Llama type, 4 layers, 4 query heads, 2 KV heads, head_dim 64; num_hidden_layers=1 makes TINY-1L."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "num_key_value_heads": 2}
    return LlamaConfig(**(SHAPE | sizes | {"head_dim": 64, "initializer_range": 0.06} | changes))


def tiny_g() -> PretrainedConfig:
    """TINY-G: Gemma 3 type, 5 sliding layers (window 64) and a global one, 2 query heads, 1 KV head, head_dim 64."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 128}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return Gemma3TextConfig(**(SHAPE | heads | {"num_hidden_layers": 6}), sliding_window=64, layer_types=kinds)


def build(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a config; the same config gives the same weights under every attention and dtype.

    Its weights can have gradients, whoever built it first: cached models serve all tests of a process.
    """
    with torch.inference_mode(mode=False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms and biases start at 1 and 0: give them something to do
                weight.data += 0.2 * torch.randn(weight.shape)
            assert torch.isfinite(weight).all(), name
    model.generation_config.eos_token_id = None
    found: PreTrainedModel = model.eval().requires_grad_(False).to(dtype)
    return found


@lru_cache(maxsize=64)
def tiny(family: str, attention: str = NAME, kv_heads: int = 2) -> PreTrainedModel:
    """Model of a family, fp32, cached: it is read-only."""
    return build(config(family, kv_heads), attention)


def engine(family: str, kv_heads: int = 2) -> Engine:
    """Engine on a tiny fp32 model whose cache dtype is the compute dtype."""
    return Engine(tiny(family, NAME, kv_heads), torch.float32)


def ids(n: int, seed: int = 0) -> list[int]:
    """n random tokens; no special one among them."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()
    return found
