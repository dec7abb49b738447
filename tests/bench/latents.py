"""What latent caches cost: prefill and decode against stock transformers, on tiny and default-size random models.

Stock of transformers 5.24 caches latents too and expands all of them in every forward, as we do. 5.2 caches the keys and values that
they expand to: there a decoded token is cheaper, and the cache several times as large.

python tests/bench/latents.py [tokens of the context]
"""

from __future__ import annotations

import sys

import torch
from measure import best
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.compat import forward

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
SIZES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "q_lora_rank": 48,
    },
    "default size": {  # width, depth and heads of SmolLM2-135M
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 9,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "q_lora_rank": None,
    },
}


def model_of(sizes: dict[str, int | None], *, latent: bool = True) -> torch.nn.Module:
    """A decoder with random weights: DeepSeek-V3 with dense feed-forward layers, or Llama."""
    shape = sizes | {"vocab_size": 4096, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    plain = {name: shape[name] for name in shape if not name.startswith(("kv_", "qk_", "v_head", "q_lora"))}
    dense = {"first_k_dense_replace": sizes["num_hidden_layers"]}
    config = DeepseekV3Config(**shape, **dense, **EXPERTS) if latent else LlamaConfig(**plain)
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval().requires_grad_(False)


@torch.inference_mode()
def stock(model, ids, cache=None):
    cache = DynamicCache(config=model.config) if cache is None else cache
    start = cache.get_seq_length()
    model.set_attn_implementation("sdpa")
    positions = torch.arange(start, start + len(ids))[None]
    forward(model, torch.tensor([ids]), positions, cache, torch.tensor([len(ids) - 1]))
    model.set_attn_implementation(NAME)
    return cache


def measure(name, model, n):
    run, ids = Engine(model, torch.float32), torch.randint(3, 4096, (n,)).tolist()
    both = best({"stock": lambda: stock(model, ids), "ours": lambda: run.prefill(ids)}, 7)
    print(f"{name}: prefill {n} tokens: ours / stock {both['ours'] / both['stock']:.3f}")
    prefix, cache = run.prefill(ids), stock(model, ids)
    held = sum(x.numel() * x.element_size() for one in cache.layers for x in (one.keys, one.values))
    print(f"{name}: bytes of {n} tokens: ours / stock {prefix.row.bytes().total / held:.3f}")

    def ours_decode() -> None:
        row = prefix.row
        for token in ids[:16]:
            (row,), _ = run.feed([row], [[token]])

    def stock_decode() -> None:
        if cache.get_seq_length() > n:
            cache.crop(n - cache.get_seq_length())
        for token in ids[:16]:
            stock(model, [token], cache)

    both = best({"stock": stock_decode, "ours": ours_decode}, 7)
    print(f"{name}: decode 16 tokens after {n}: ours / stock {both['ours'] / both['stock']:.3f}")


if __name__ == "__main__":
    for name, sizes in SIZES.items():
        for kind, latent in (("latents", True), ("keys and values", False)):
            measure(f"{name}, {kind}", model_of(sizes, latent=latent), int([*sys.argv[1:], "1024"][0]))
