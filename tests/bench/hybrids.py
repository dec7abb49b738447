"""What a hybrid costs beside stock transformers: prefill and decode of random models, the best of interleaved repetitions.

python tests/bench/hybrids.py [family ...] [--wide]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from measure import best

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.compat import forward
from tests.support import hybrids
from tests.support.tiny_models import build, ids

WIDE: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
TOKENS, STEPS = 512, 32


def measure(family: str, *, wide: bool) -> str:
    """Ratios of one family; wide: with the sizes of the default model."""
    settings = hybrids.HYBRIDS[family]()
    for key, value in WIDE.items() if wide else ():
        setattr(settings, key, value)
    model, run = build(settings, "sdpa"), Engine(build(settings, NAME), torch.float32)
    tokens = ids(TOKENS)

    @torch.inference_mode()
    def stock(cache: Any, fed: list[int], seen: int) -> None:
        forward(model, torch.tensor([fed]), torch.arange(seen, seen + len(fed))[None], cache, torch.tensor([len(fed) - 1]))

    read = best({"stock": lambda: stock(hybrids.stock_cache(family), tokens, 0), "ours": lambda: run.prefill(tokens)}, 5)
    prefix = run.prefill(tokens)

    def our_steps() -> None:
        row = prefix.row
        for token in tokens[:STEPS]:
            (row,), _ = run.feed([row], [[token]])

    def stock_steps() -> float:
        cache = hybrids.stock_cache(family)
        stock(cache, tokens, 0)
        return best({"steps": lambda: [stock(cache, [t], TOKENS + i) for i, t in enumerate(tokens[:STEPS])]}, 1)["steps"]

    theirs, ours = float("inf"), float("inf")
    for _ in range(5):
        theirs, ours = min(theirs, stock_steps()), min(ours, best({"steps": our_steps}, 1)["steps"])
    return f"{family}: prefill {TOKENS} tokens {read['ours'] / read['stock']:.3f}, decode {STEPS} steps {ours / theirs:.3f}"


if __name__ == "__main__":
    named = [one for one in sys.argv[1:] if not one.startswith("--")]
    for one in named or hybrids.HYBRIDS:
        print(measure(one, wide="--wide" in sys.argv), "of stock", flush=True)
