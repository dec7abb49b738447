"""What attention of families with sinks, soft caps, biases or chunks costs against stock transformers, on random weights.

python tests/bench/softmax_families.py tiny|default [family ...]
"""

from __future__ import annotations

import sys

import torch
from measure import best
from transformers import DynamicCache, PreTrainedModel

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.compat import forward
from tests.support.softmax_models import FAMILIES, TIER_1, make

PROMPT, STEPS = 1024, 32
# As wide as the default model; some of its layers are enough for a ratio.
DEFAULT = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536}


def stock(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> DynamicCache:
    with torch.inference_mode():
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(tokens))[None]
        forward(model, torch.tensor([tokens]), positions, cache, torch.tensor([len(tokens) - 1]))
    return cache


def main() -> None:
    size, *names = sys.argv[1:] or ["tiny"]
    for name in names or TIER_1:
        family = FAMILIES[name]
        changes = DEFAULT if size == "default" else {}
        config = family.config(max_position_embeddings=4096, sliding_window=128, **changes)
        model, run = make(config, family.stock), Engine(make(config, NAME), torch.float32)
        tokens = torch.randint(3, 120, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()

        def stock_prefill(model: PreTrainedModel = model, tokens: list[int] = tokens) -> DynamicCache:
            return stock(model, tokens, DynamicCache(config=model.config))

        held, prefix = stock_prefill(), run.prefill(tokens)

        def ours_decode(run: Engine = run, prefix=prefix, tokens: list[int] = tokens) -> None:
            row = prefix.row
            for token in tokens[:STEPS]:
                (row,), _ = run.feed([row], [[token]])

        def stock_decode(model: PreTrainedModel = model, held: DynamicCache = held, tokens: list[int] = tokens) -> None:
            for token in tokens[:STEPS]:  # goes on from the last call's end: a window cannot be taken back
                stock(model, [token], held)

        reading = best({"stock": stock_prefill, "ours": lambda run=run, tokens=tokens: run.prefill(tokens)}, 5)
        decoding = best({"stock": stock_decode, "ours": ours_decode}, 5)
        ratios = [one["ours"] / one["stock"] for one in (reading, decoding)]
        print(
            f"{name}, {size}: prefill of {PROMPT} tokens {ratios[0]:.2f}, decode {ratios[1]:.2f} (ours / stock {family.stock})"
        )


if __name__ == "__main__":
    main()
