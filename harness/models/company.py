"""Whether a model's logits are the same bits in any company: tried on noise when it is prepared, never taken for granted.

Products in tiles are most of it. What is left are functions of single numbers in layers of odd widths (a gate of one number a
token): a library computes the last few of a tensor in another way, and which those are depends on what shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Cache = TypeVar("Cache")

FIRST = (5, 1, 3, 7, 2, 4)  # tokens that each sequence is given at first; one token each afterwards
STEPS = 3
COMPARED = (0, 3)  # sequences that are also fed alone


class Feeds(Protocol[Cache]):
    """What feeds sequences, in lockstep or alone: the engine."""

    def start(self, *, length: int) -> Cache: ...

    def feed(self, caches: Sequence[Cache], ids: Sequence[Sequence[int]]) -> tuple[list[Cache], Tensor]: ...


def same_in_company(engine: Feeds[Cache], vocabulary: int) -> bool:
    """Whether some sequences have, bit for bit, the logits that they have alone."""
    together = _logits(engine, range(len(FIRST)), vocabulary)
    return all(torch.equal(_logits(engine, [i], vocabulary)[:, 0], together[:, i]) for i in COMPARED)


def _logits(engine: Feeds[Cache], some: Sequence[int], vocabulary: int) -> Tensor:
    """Last logits [steps, sequences, V] of these sequences, fed together."""
    caches = [engine.start(length=FIRST[i] + STEPS) for i in some]
    found = []
    for step in range(STEPS):
        ids = [[(97 * i + 31 * step + 7 * k) % vocabulary for k in range(FIRST[i] if step == 0 else 1)] for i in some]
        caches, logits = engine.feed(caches, ids)
        found.append(logits)
    return torch.stack(found)
