"""What our attention costs: prefill and decode against stock transformers, and prefill with exact column sums.

python tests/bench/overhead.py [tokens for statistics]
Time is CPU time of one thread: other work on the machine does not count.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch
from measure import best, engine, prose, setup, stock
from transformers import DynamicCache

from harness.kv.compat import forward
from harness.models.load import LM
from harness.stages.protocols import Needs

SUMS = Needs(column_sums=True)


@torch.inference_mode()
def stock_reads(lm: LM, ids: list[int], cache: DynamicCache | None = None) -> DynamicCache:
    """transformers' own cache after these tokens; inside `stock`."""
    cache = cache or DynamicCache(config=lm.model.config)
    start = cache.get_seq_length()
    forward(lm.model, torch.tensor([ids]), torch.arange(start, start + len(ids))[None], cache, [len(ids) - 1])
    return cache


def stock_prefill(lm: LM, ids: list[int]) -> DynamicCache:
    with stock(lm):
        return stock_reads(lm, ids)


def peak(tokens: int) -> int:
    """Peak resident memory of a fresh process that reads `tokens` tokens with column sums, in MiB."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(tokens)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    tokens = int([*sys.argv[1:], "4096"][0])
    lm, _ = setup("compress=full")
    run = engine(lm, torch.float32)  # kv_dtype = compute dtype: nothing but the attention differs
    ids = prose(lm, tokens)
    short = ids[:1024]
    both = best({"stock": lambda: stock_prefill(lm, short), "ours": lambda: run.prefill(short)}, 5, time.process_time)
    print(f"prefill 1024 tokens: ours / stock {both['ours'] / both['stock']:.3f}")
    prefix, cache = run.prefill(short), stock_prefill(lm, short)

    def ours_decode() -> None:
        row = prefix.row
        for token in short[:32]:
            (row,), _ = run.feed([row], [[token]])

    def stock_decode() -> None:
        cache.crop(1024 - cache.get_seq_length()) if cache.get_seq_length() > 1024 else None
        with stock(lm):
            for token in short[:32]:
                stock_reads(lm, [token], cache)

    both = best({"stock": stock_decode, "ours": ours_decode}, 5, time.process_time)
    print(f"decode 32 tokens after 1024: ours / stock {both['ours'] / both['stock']:.3f}")
    both = best({"stock": lambda: stock_prefill(lm, ids), "sums": lambda: run.prefill(ids, SUMS)}, 3, time.process_time)
    print(f"prefill {tokens} tokens with exact column sums: ours / stock {both['sums'] / both['stock']:.3f}")
    sizes = {n: peak(n) for n in (2048, 4096, 8192)}
    print("peak resident MiB with column sums:", ", ".join(f"{n} tokens {size}" for n, size in sizes.items()))


if "--peak" in sys.argv:
    lm, _ = setup("compress=full")
    engine(lm, torch.float32).prefill(prose(lm, int(sys.argv[-1])), SUMS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
elif __name__ == "__main__":
    main()
