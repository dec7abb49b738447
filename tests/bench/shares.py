"""What sharing costs beside int8 with dynamic scales: time to store a context and to read it once in every layer.

python tests/bench/shares.py [tokens]
The shape is the default model's: 30 layers x 3 KV heads x 64, 16-bit cache, fp32 compute; CPU time of one thread, runs
interleaved, best of three. The bar is five times int8.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.head_group import HeadGroup
from harness.kv.sequence_cache import SequenceCache
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.token_store import TokenStore
from harness.stages.encoded import Heads
from harness.stages.protocols import Stats
from harness.stages.stack import EXACT, Stack
from tests.support import conf_tree
from tests.support.tiny_models import build, tiny_a

TOKENS, LAYERS, HEADS, D = int([*sys.argv[1:], "2048"][0]), 30, 3, 64
NAMES = (
    "int8",
    "gqa_pool",
    "mqa_pool",
    "gqa_aligned",
    "cla2",
    "yoco",
    "similar_layers",
    "minicache",
    "minicache_int8",
    "transmla",
)
BAR = 5.0
WHY = {"transmla": "keys and values of all heads are mixed, projected and expanded again by matrices of their layer"}


def exact() -> SequenceCache:
    """A context of random numbers, as a prefill leaves it."""
    g, heads = torch.Generator().manual_seed(0), Heads(tuple(range(LAYERS)), 0, HEADS)
    rows = (torch.randn(heads.n, TOKENS, D, generator=g).bfloat16() for _ in range(2))
    keys, values = (TokenStore.of(x, EXACT, None, heads) for x in rows)
    rope = Engine(build(tiny_a(num_hidden_layers=1), NAME), torch.bfloat16).ropes[0]  # Llama's, for heads as wide
    whole = SequenceCache(
        ModelShape((LayerShape(HEADS, D, D),) * LAYERS, 9), Stack(), (HeadGroup(heads, keys, values),), TOKENS
    )
    return replace(whole, ropes=(rope,) * LAYERS)


def seconds(whole: SequenceCache, stack: Stack, stats: Sequence[Stats] = (Stats(),) * LAYERS) -> tuple[float, float]:
    """CPU time to store the context under a stack, and to read all layers."""
    start = time.thread_time()
    row = whole.compress(stack, stats, 0, torch.float32)
    middle = time.thread_time()
    most = max(group.n for group in row.head_groups)
    out, twice = torch.empty(HEADS, most, D), torch.empty(HEADS, most, 2 * D)  # keys of `transmla` are read beside their rest
    for layer in range(LAYERS):
        for slot in row.slots[layer]:
            slot.keys.write_to((twice if slot.head_group.folded else out)[slot.heads], slot.at)
            slot.values.write_to(out[slot.heads], slot.at)
    return middle - start, time.thread_time() - middle


def main() -> None:
    """A line for every share, the reason where one takes more than the bar, and exit code 1 where there is none."""
    torch.set_num_threads(1)
    whole, best = exact(), dict.fromkeys(NAMES, (float("inf"), float("inf")))
    stacks = {n: conf_tree.stack(n, *(["share.readers=0.5"] if n == "similar_layers" else [])) for n in NAMES}
    for _ in range(3):
        for name, stack in stacks.items():
            best[name] = min(best[name], seconds(whole, stack), key=sum)
    base = sum(best["int8"])
    for name, (store, read) in best.items():
        print(f"{name:16} store {store / base:5.2f}  read {read / base:5.2f}  together {(store + read) / base:5.2f} x int8")
    late = [name for name, both in best.items() if sum(both) > BAR * base and name not in WHY]
    for name in WHY:
        if sum(best[name]) > BAR * base:
            print(f"{name} takes more than {BAR:g} x, because {WHY[name]}")
    print(f"more than {BAR:g} x without a reason: {', '.join(late) or 'none'}")
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
