"""A long stream under a fixed budget: bytes held and time per chunk at its start and at its end.

python tests/bench/constant_cost.py [model] [tokens] [chunk] [budget]      model: smollm2 or tiny_llama
"""

from __future__ import annotations

import sys
import time
from statistics import median

from measure import engine, prose, setup

from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.score.recency import Recency
from harness.stages.stack import Stack

MODEL, TOKENS, CHUNK, BUDGET = [*sys.argv[1:], *["smollm2", "50000", "32", "512"][len(sys.argv) - 1 :]]
WINDOWS = 10  # parts of the stream that are compared

lm, _ = setup(f"model={MODEL}", "compress=streaming")
run, chunk, budget = engine(lm), int(CHUNK), int(BUDGET)
ids = prose(lm, int(TOKENS))
for positions in ("original", "cache"):
    keep = Keep(scorer=Recency(), budget=Amount(unit="tokens", value=budget), sinks=4)
    row = run.start(Stack(keep=keep, phase="always", positions=positions))
    seconds, held = [], []
    for at in range(0, len(ids), chunk):
        start = time.perf_counter()
        (row,) = run.read([row], [ids[at : at + chunk]]).rows
        seconds.append(time.perf_counter() - start)
        held.append(row.bytes().total)
    size = len(seconds) // WINDOWS
    parts = [median(seconds[i * size : (i + 1) * size]) for i in range(WINDOWS)]
    print(f"{MODEL}, {positions} positions: {len(ids)} tokens, chunk {chunk}, budget {budget}")
    print(f"  bytes held after the first tenth {held[size]}, at the end {held[-1]}")
    print("  median time of a chunk, by tenths, against the second: " + " ".join(f"{p / parts[1]:.2f}" for p in parts))
