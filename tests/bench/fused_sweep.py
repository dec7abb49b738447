"""Sixteen (stack, point) pairs on one context: each by itself against all in one pass, with the settings of a run.

python tests/bench/fused_sweep.py [tokens] [examples] [new tokens, of which the ratio is printed as well, ...]
Time is CPU time of one thread, from the start of the prefill to each of the numbers of new tokens; other work on the machine
does not count. Beside it what stock transformers would take for sixteen answers without any compression: one plain prefill, its
cache copied to sixteen rows, a batch that decodes in lockstep.
"""

from __future__ import annotations

import sys
import time

import torch
from measure import ALL_VIEWS, engine, prose, setup, stock, stock_batch

from harness.engine.answers import Ask
from harness.kv.compat import forward
from harness.stages.protocols import Needs

TOKENS, EXAMPLES = (int(a) for a in [*sys.argv[1:], *["2048", "1"][len(sys.argv) - 1 :]][:2])
NEW = sorted({int(a) for a in sys.argv[3:] or ("12", "64")})
STACKS = "stacks=[int8,int4,streaming,h2o,sink_h2o_int8,tova,snapkv]"

lm, cells = setup(STACKS)
cells = [c for c in cells if c.point.get("keep.budget.value", 0.5) != 0.75][:16]
assert len(cells) == 16, len(cells)
run = engine(lm, invariant=True)
question = lm.tokens.encode(" What is the special magic number mentioned in the text above? The special magic number is:")


def answer(ids: list[int], chosen: list, spent: dict[int, float]) -> list[tuple[tuple[int, ...], list]]:
    """Answers and kept sets; adds the CPU seconds to each of the numbers of new tokens to `spent`."""
    begin, needs = time.process_time(), Needs()
    for cell in chosen:
        needs = needs | cell.stack.needs
    prefix = run.prefill(ids, needs)
    rows = [run.compress(prefix, cell.stack) for cell in chosen]
    ready = time.process_time()
    kept = [[p.tolist() for layer in row.kept_positions() for p in layer] for row in rows]
    begin += time.process_time() - ready

    def clock(generated: list[int]) -> bool:
        if len(generated) in NEW:
            spent[len(generated)] += time.process_time() - begin
        return False

    asks = [Ask(row=row, held=question, max_new=NEW[-1], stop=lambda ids: False) for row in rows]
    asks[-1] = Ask(row=rows[-1], held=question, max_new=NEW[-1], stop=clock)
    return list(zip([a.ids for a in run.answer(asks, ALL_VIEWS)], kept, strict=True))


@torch.inference_mode()
def by_stock(ids: list[int], spent: dict[int, float]) -> None:
    """Adds the CPU seconds to each of the numbers of new tokens of transformers' own cache and attention to `spent`."""
    begin, at, fed = time.process_time(), len(ids), question
    cache = stock_batch(lm, ids, len(cells))
    for done in range(1, NEW[-1] + 1):
        places = torch.arange(at, at + len(fed)).expand(len(cells), -1)
        forward(lm.model, torch.tensor(fed).expand(len(cells), -1), places, cache, [len(fed) - 1])
        fed, at = question[:1], at + len(fed)
        if done in spent:
            spent[done] += time.process_time() - begin


total = {name: dict.fromkeys(NEW, 0.0) for name in ("alone", "fused", "stock")}
same_kept = same_answers = pairs = 0
answer(prose(lm, 512), cells, dict.fromkeys(NEW, 0.0))  # what is done once: products of every number of rows are tried
for example in range(EXAMPLES):
    ids = prose(lm, TOKENS, skip=example * TOKENS)
    fused = answer(ids, cells, total["fused"])
    with stock(lm):
        by_stock(ids, total["stock"])
    alone = [answer(ids, [cell], total["alone"])[0] for cell in cells]
    for a, f in zip(alone, fused, strict=True):
        pairs += 1
        same_answers += a[0] == f[0]
        same_kept += a[1] == f[1]
print(f"{len(cells)} pairs, {TOKENS} tokens, {EXAMPLES} examples")
for new in NEW:
    a, f, s = (total[name][new] for name in ("alone", "fused", "stock"))
    print(f"{new} new tokens: alone {a:.1f} s, fused {f:.1f} s, ratio {a / f:.2f}; a stock batch {s:.1f} s, ratio {a / s:.2f}")
print(f"same kept sets {same_kept}/{pairs}, same answers {same_answers}/{pairs}")
