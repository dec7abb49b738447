"""What a decode step costs on the make-believe accelerator, for any batch of sequence caches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support.make_believe.accelerator import Accelerator, Costs
from tests.support.tiny_models import ids

VIEWS = 1 << 30  # bytes: as many decoded copies as there are


def compressed(engine: Engine, stacks: Sequence[Stack], tokens: int) -> list[SequenceCache]:
    """One context of so many tokens under every stack."""
    context, needs = ids(tokens, 1), Needs()
    for stack in stacks:
        needs |= stack.needs
    prefix = engine.prefill(context, needs)
    return [
        engine.read_chunked(context, [engine.start(stack, tokens, 7)])[0][0]
        if stack.chunked
        else engine.compress(prefix, stack, 7)
        for stack in stacks
    ]


def decode_steps(engine: Engine, at: Accelerator, rows: Sequence[SequenceCache], steps: int, views: int = VIEWS) -> list[Costs]:
    """Costs of each of so many steps of one new token for every row; those before everything is in place are left out."""
    marks: list[Costs] = []

    def mark(_: object) -> bool:
        marks.append(at.costs.copy())
        return False

    asks = [Ask(row=row, held=ids(2, k), max_new=steps + 3) for k, row in enumerate(rows)]
    asks[0] = Ask(row=rows[0], held=ids(2, 0), max_new=steps + 3, stop=mark)
    engine.answer(asks, views)
    return [after - before for before, after in pairwise(marks[2:])]
