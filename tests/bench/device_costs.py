"""What a decode step costs on a make-believe accelerator, stack by stack: times the host waits, uploads among them, kernels.

python tests/bench/device_costs.py [layers] [rows] [tokens]
No accelerator is needed: every operator runs on the CPU and is counted (tests/support/make_believe). Each stack decodes a batch of
its own rows, then all of them one mixed batch; the mean over steps, flushes and evictions included, and the most waits of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import DynamicCache

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from tests.support import tiny_models
from tests.support.make_believe.accelerator import Accelerator, Costs
from tests.support.make_believe.steps import compressed, decode_steps
from tests.support.make_believe.tensors import FIRST
from tests.support.make_believe.trial import stacks
from tests.support.tiny_models import ids

LAYERS, ROWS, TOKENS = (int(a) for a in [*sys.argv[1:], *["4", "8", "200"][len(sys.argv) - 1 :]])
STEPS = 9


def line(name: str, steps: Sequence[Costs]) -> None:
    n = len(steps)
    waits, uploads = [one.synchronisations for one in steps], [one.uploads.total() for one in steps]
    kernels = sum(one.kernels for one in steps) / n
    print(f"{name[:44]:44} {sum(waits) / n:6.1f} {max(waits):6} {sum(uploads) / n:8.1f} {kernels:9.0f} {kernels / LAYERS:9.1f}")


@torch.inference_mode()
def stock(at: Accelerator) -> list[Costs]:
    """Transformers' own cache and attention: forward, the most likely token, ids to the host."""
    model = tiny_models.build(config(), "sdpa").to(FIRST)
    cache, fed, marks = DynamicCache(config=model.config), torch.tensor([ids(TOKENS)] * ROWS, device=FIRST), [at.costs.copy()]
    for _ in range(STEPS + 2):
        fed = (
            model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        )
        fed.tolist()
        marks.append(at.costs.copy())
    return [after - before for before, after in pairwise(marks[2:])]


def config() -> object:
    found = tiny_models.config("llama")
    found.update({"num_hidden_layers": LAYERS})
    return found


accelerator, every = Accelerator(), stacks()
with accelerator.on():
    print(f"{ROWS} rows, {LAYERS} layers, {TOKENS} tokens; a decode step")
    print(f"{'':44} {'waits':>6} {'most':>6} {'uploads':>8} {'kernels':>9} {'a layer':>9}")
    line("stock transformers", stock(accelerator))
    engine = Engine(tiny_models.build(config(), NAME).to(FIRST), torch.bfloat16)
    rows = dict(zip(every, compressed(engine, list(every.values()), TOKENS), strict=True))
    for name, row in rows.items():
        line(name, decode_steps(engine, accelerator, [row] * ROWS, STEPS))
    line(f"all {len(rows)} in one batch", decode_steps(engine, accelerator, list(rows.values()), STEPS))
