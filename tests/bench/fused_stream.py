"""Sixteen stacks over one stream: each alone against all in lockstep. Prints tokens per second of both and their ratio.

python tests/bench/fused_stream.py [tokens] [chunk] [repeats]
"""

from __future__ import annotations

import sys

from measure import best, engine, prose, setup

from harness.engine.streams import Reading, read

TOKENS, CHUNK, REPEATS = (int(a) for a in [*sys.argv[1:], *["256", "1", "1"][len(sys.argv) - 1 :]])

lm, cells = setup("stacks=[int8,int4,streaming,h2o,sink_h2o_int8,window]")
cells = [c for c in cells if c.stack.keep is None or c.stack.evicts_steps][:16]
assert len(cells) == 16, len(cells)
run = engine(lm)
ids = tuple(prose(lm, TOKENS))


def stream(chosen: list) -> None:
    wave = [Reading(ids=ids, row=run.start(cell.stack, TOKENS, 0), reference=0) for cell in chosen]
    read(run, wave, CHUNK)


def alone() -> None:
    for cell in cells:
        stream([cell])


times = best({"fused": lambda: stream(cells), "alone": alone}, REPEATS)
for name, seconds in times.items():
    print(f"{name}: {16 * TOKENS / seconds:.1f} tokens a second over 16 stacks")
print(f"ratio {times['alone'] / times['fused']:.2f} at chunk {CHUNK}, {TOKENS} tokens")
