"""Sixteen stacks over one stream: each by itself against all in lockstep, with the settings of a run.

python tests/bench/fused_stream.py [tokens] [chunk] [repeats]
Each by itself is one sequence, or two with the full cache that a run compares it with; both ratios are printed. Time is CPU time
of one thread, the best of interleaved repeats. The last line is what the products with the weights alone would allow: arms that
have parted share nothing but those, and on a CPU a chunk of one arm already fills the arithmetic units.
"""

from __future__ import annotations

import sys
import time

from measure import ALL_VIEWS, best, engine, products, prose, setup

from harness.engine.streams import Reading, read
from harness.stages.stack import Stack

TOKENS, CHUNK, REPEATS = (int(a) for a in [*sys.argv[1:], *["256", "1", "1"][len(sys.argv) - 1 :]])

lm, cells = setup("stacks=[int8,int4,streaming,h2o,sink_h2o_int8,window]")
cells = [c for c in cells if c.stack.keep is None or c.stack.evicts_steps][:16]
assert len(cells) == 16, len(cells)
run = engine(lm, invariant=True)
ids = tuple(prose(lm, TOKENS))


def stream(stacks: list[Stack]) -> None:
    wave = [Reading(ids=ids, row=run.start(stack, TOKENS, 0), reference=0) for stack in stacks]
    read(run, wave, CHUNK, ALL_VIEWS)


def alone(compared: bool) -> None:
    for cell in cells:
        stream([*([Stack()] if compared and cell.stack.compresses else []), cell.stack])


assert not cells[0].stack.compresses
ways = {
    "fused": lambda: stream([cell.stack for cell in cells]),
    "alone": lambda: alone(False),
    "alone, compared": lambda: alone(True),
}
read(run, [Reading(ids=ids[: 2 * CHUNK + 1], row=run.start(), reference=0)], CHUNK, 0)  # what is done once
times = best(ways, REPEATS, time.process_time)
for name, seconds in times.items():
    print(f"{name}: {16 * TOKENS / seconds:.1f} tokens a second over 16 stacks, ratio {seconds / times['fused']:.2f}")
print(f"chunk {CHUNK}, {TOKENS} tokens")
one, together = products(lm, CHUNK), products(lm, 16 * CHUNK)
print(
    f"products with the weights: {CHUNK} rows {one * 1000:.0f} ms, {16 * CHUNK} rows {together * 1000:.0f} ms, ratio {16 * one / together:.2f}"
)
