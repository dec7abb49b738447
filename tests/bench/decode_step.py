"""A decode step of 16 mixed stacks of the default experiment against stock transformers' batch of 16: time and kernels a layer.

python tests/bench/decode_step.py [tokens] [steps] [repeats]
Time is CPU time of one thread (other work on the machine does not count), a mean over the steps, flushes and evictions included;
runs are interleaved and the best of the repeats counts. Kernels: what torch's profiler shows of operators that call no other and
are no views or allocations. Views: decoded copies of the stores kept between steps, or none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import ALL_VIEWS, engine, prose, setup, stock, stock_batch
from torch.profiler import ProfilerActivity, profile

from harness.engine.engine import Ask
from harness.kv.compat import forward
from harness.stages.protocols import Needs

TOKENS, STEPS, REPEATS = (int(a) for a in [*sys.argv[1:], *["1024", "64", "2"][len(sys.argv) - 1 :]])
ROWS = 16
QUARTER = ("streaming", "h2o", "sink_h2o_int8", "snapkv", "snapkv_int4", "tova", "knorm", "random")
HALF = ("streaming", "h2o", "sink_h2o_int8", "snapkv_int4", "tova")
MIXED = [*((name, None) for name in ("full", "int8", "int4")), *((n, 0.25) for n in QUARTER), *((n, 0.5) for n in HALF)]
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "as_strided", "view", "unbind", "slice", "select", "expand", "t"}
FREE |= {"transpose", "permute", "unsqueeze", "squeeze", "alias", "lift_fresh", "detach", "detach_", "resize_", "reshape", "to"}
FREE |= {
    "_reshape_alias",
    "narrow",
    "split",
    "unflatten",
    "flatten",
    "result_type",
    "item",
    "_local_scalar_dense",
    "is_nonzero",
}
FREE |= {
    "resolve_conj",
    "resolve_neg",
    "contiguous",
    "float",
    "numpy_T",
    "mT",
    "view_as",
    "expand_as",
    "set_",
    "_unsafe_view",
    "lift",
    "set_data",
    "data",
}
WHOLE = {
    "scaled_dot_product_attention",
    "pow",
    "mean",
    "sum",
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "gt",
    "le",
    "ge",
    "clamp",
}
WHOLE |= {"add_", "sub_", "mul_", "div_", "clamp_", "sort", "masked_fill_", "where", "amax", "argsort"}

torch.set_num_threads(1)
lm, cells = setup("experiment=default")
found = {(cell.label, cell.point.get("keep.budget.value")): cell for cell in cells}
chosen = [found[one] for one in MIXED]
run, ids = engine(lm), prose(lm, TOKENS)
needs = Needs()
for cell in chosen:
    needs = needs | cell.stack.needs
prefix = run.prefill(ids, needs)
rows = [run.compress(prefix, cell.stack) for cell in chosen]


def ours(views: int, steps: int) -> float:
    """CPU seconds of a step once all rows go token by token."""
    marks: list[float] = []

    def stop(_: object) -> bool:
        marks.append(time.process_time())
        return False

    run.answer(
        [Ask(row=row, held=ids[:1], max_new=steps + 2, stop=stop if row is rows[0] else lambda _: False) for row in rows], views
    )
    return (marks[-1] - marks[1]) / steps


@torch.inference_mode()
def by_stock(steps: int) -> float:
    """The same of transformers' own cache and attention."""
    marks = []
    with stock(lm):
        cache = stock_batch(lm, ids, ROWS)
        for at in range(TOKENS, TOKENS + steps + 2):
            forward(lm.model, torch.full((ROWS, 1), 5), torch.full((ROWS, 1), at), cache, torch.tensor([0]))
            marks.append(time.process_time())
    return (marks[-1] - marks[1]) / steps


def _works(event: Any) -> bool:
    """Whether an operator launches work of its own: it is no view, and not a step inside one that is a kernel elsewhere."""
    above = event.cpu_parent
    while above is not None:
        if above.name.removeprefix("aten::") in WHOLE:
            return False
        above = above.cpu_parent
    return event.name.startswith("aten::") and event.name.removeprefix("aten::") not in FREE


def kernels(function: Callable[[int], object], steps: int) -> float:
    """Operators that launch work, a step and layer: those of a long run less those of a short one."""

    def count(n: int) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            function(n)
        return sum(_works(e) and not any(_works(child) for child in e.cpu_children) for e in seen.events() or ())

    return (count(steps + 1) - count(1)) / steps / len(run.shape.layers)


ways: dict[str, Callable[[int], float]] = {
    "stock": by_stock,
    "views auto": lambda n: ours(ALL_VIEWS, n),
    "views off": lambda n: ours(0, n),
}
times = dict.fromkeys(ways, float("inf"))
for _ in range(REPEATS):
    for name, way in ways.items():
        times[name] = min(times[name], way(STEPS))
print(f"{ROWS} stacks, {TOKENS} tokens, {STEPS} steps")
base = 0.0
for name, way in ways.items():
    launched = kernels(way, min(STEPS, 32))
    base = base or launched
    print(
        f"{name:11} {times[name] * 1e3:7.1f} ms a step, {times[name] / times['stock']:.2f} of stock; "
        f"{launched:6.1f} kernels a layer, {launched / base:.2f} of stock"
    )
