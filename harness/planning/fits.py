"""What fits on an accelerator beside the parameters: sequences at a length, and the length at a batch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from harness.errors import UserError
from harness.kv.shape import ModelShape
from harness.planning.gpus import Gpu
from harness.planning.sizes import size
from harness.stages.stack import Stack


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory for KV caches.

    Attributes:
        gpu: the accelerator.
        number: how many of it hold one model together (tensor parallel).
        utilization: share of the memory that weights and caches may take; the rest is left to activations and the runtime.
        parameters: bytes of all weights.
    """

    gpu: Gpu
    number: int
    utilization: float
    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes left for caches; negative where the weights alone do not fit."""
        return int(self.gpu.memory * self.number * self.utilization) - self.parameters


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How sequences are held: cache dtype in bytes an element, tokens a page, answer tokens."""

    itemsize: int
    page: int
    new: int


def most_sequences(room: int, stack: Stack, shape: ModelShape, context: int, serving: Serving) -> int:
    """Sequences of this context that fit; where a size has bounds, by the upper one."""
    each = size(stack, shape, context, serving.itemsize, serving.new, serving.page).high
    return max(0, room // max(1, each))


def longest(room: int, stack: Stack, shape: ModelShape, batch: int, serving: Serving, limit: int) -> int:
    """The longest context, up to `limit` tokens, of which `batch` fit; 0 where none does.

    Where bytes fall once a block is full, a longer one may fit too: this is a length up to which bisection found all to fit.
    """

    def needed(context: int) -> int:
        try:
            return batch * size(stack, shape, context, serving.itemsize, serving.new, serving.page).high
        except UserError:
            return 0  # too short for the budget: it is not what limits the length

    return bisect_right(range(1, limit + 1), room, key=needed)
