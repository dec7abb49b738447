"""Sixteen (stack, point) pairs on one context: each alone against all in one pass. Prints both times and their ratio.

python tests/bench/fused_sweep.py [tokens] [examples]
"""

from __future__ import annotations

import sys

from measure import best, engine, prose, setup

from harness.engine.answers import Ask
from harness.stages.protocols import Needs

TOKENS, EXAMPLES = (int(a) for a in [*sys.argv[1:], "2048", "3"][:2])
NEW = 12
STACKS = "stacks=[int8,int4,streaming,h2o,sink_h2o_int8,tova,snapkv]"

lm, cells = setup(STACKS)
cells = [c for c in cells if c.point.get("keep.budget.value", 0.5) != 0.75][:16]
assert len(cells) == 16, len(cells)
run = engine(lm)
question = lm.tokens.encode(" What is the special magic number mentioned in the text above? The special magic number is:")


def answer(ids: list[int], chosen: list) -> list[tuple[tuple[int, ...], list]]:
    needs = Needs()
    for cell in chosen:
        needs = needs | cell.stack.needs
    prefix = run.prefill(ids, needs)
    rows = [run.compress(prefix, cell.stack) for cell in chosen]
    kept = [[p.tolist() for layer in row.kept_positions() for p in layer] for row in rows]
    answers = run.answer([Ask(row=row, held=question, max_new=NEW) for row in rows])
    return list(zip([a.ids for a in answers], kept, strict=True))


total = {"alone": 0.0, "fused": 0.0}
same_kept = same_answers = pairs = 0
for example in range(EXAMPLES):
    ids = prose(lm, TOKENS, skip=example * TOKENS)
    results: dict[str, list] = {"alone": [], "fused": []}

    def alone(ids=ids, results=results) -> None:
        results["alone"] = [answer(ids, [cell])[0] for cell in cells]

    def fused(ids=ids, results=results) -> None:
        results["fused"] = answer(ids, cells)

    times = best({"fused": fused, "alone": alone}, 1)
    for name in total:
        total[name] += times[name]
    for a, f in zip(results["alone"], results["fused"], strict=True):
        pairs += 1
        same_answers += a[0] == f[0]
        same_kept += a[1] == f[1]
    print(
        f"example {example}: alone {times['alone']:.1f} s, fused {times['fused']:.1f} s, ratio {times['alone'] / times['fused']:.2f}"
    )
print(f"{len(cells)} pairs, {TOKENS} tokens, {EXAMPLES} examples: alone {total['alone']:.1f} s, fused {total['fused']:.1f} s")
print(f"ratio {total['alone'] / total['fused']:.2f}; same kept sets {same_kept}/{pairs}, same answers {same_answers}/{pairs}")
