"""Which requests decode together: as many as fit a memory limit, halved when one fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from harness.errors import UserError
from harness.kv.memory import Budget, predict, solve_budget
from harness.kv.shape import ModelShape
from harness.stages.stack import Stack

MOST_TOGETHER = 48  # beyond this a shared step saves nothing more, and a kill loses more work

Item = TypeVar("Item")
Result = TypeVar("Result")


def parse_bytes(key: str, value: object) -> int:
    """`4GiB`, `500MB` or a number of bytes."""
    try:
        size = 0 if isinstance(value, bool) else int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        size = 0
    if size < 1:
        raise UserError(f"{key}={value!r} is not possible: a positive size such as 4GiB, 500MB or a number of bytes")
    return size


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes a sequence cache will take, from shapes alone: its store at the end, and what reading a layer needs."""

    shape: ModelShape
    kv_itemsize: int
    itemsize: int  # of the compute dtype
    vocabulary: int

    def prefix(self, context: int) -> int:
        """Bytes of the exact context."""
        return self.shape.full_bytes(context, self.kv_itemsize)

    def solve(self, stack: Stack, context: int) -> Budget:
        """The stack's budget for a context of so many tokens; UserError when it is too small."""
        return Budget(solve_budget(stack, self.shape, context, self.kv_itemsize))

    def cache(self, stack: Stack, budget: Budget, context: int, growth: int, fed: int = 1) -> int:
        """Bytes of one sequence cache after `growth` tokens more, with the logits of `fed` tokens at once."""
        kept = context if budget.tokens is None else min(budget.tokens, context)
        growth = min(growth, stack.every) if stack.evicts_steps and kept < context else growth
        held = kept + (max(growth, stack.chunk) if stack.chunked else growth)
        store = predict(stack, self.shape, held, self.kv_itemsize, context + growth, held - kept)
        states = self.shape.constant
        if not stack.compresses:  # shares the prefix, which is counted apart, but for states, which every token changes
            store -= self.prefix(context) - states
        decoded = max(layer.read_bytes(self.itemsize) for layer in self.shape.layers) * (held + growth)
        if stack.read == "cached":
            store += sum(layer.token_bytes(self.itemsize) for layer in self.shape.layers) * held
        return store + 2 * decoded + 2 * states + 4 * self.vocabulary * fed


def few(item: Item, batch: Sequence[Item]) -> bool:
    """Whether a batch has a place for one more."""
    return len(batch) < MOST_TOGETHER


def fill(
    items: Iterable[Item],
    size: Callable[[Item, Sequence[Item]], int],
    limit: int,
    joins: Callable[[Item, Sequence[Item]], bool] = few,
) -> Iterator[list[Item]]:
    """Batches in the order of the items.

    Args:
        items: read one further than the batch that is yielded, and no more.
        size: the bytes that an item adds to the batch so far.
        limit: bytes of a batch; an item that is larger alone has a batch of its own.
        joins: whether an item may join the batch so far.
    """
    batch: list[Item] = []
    used = 0
    for item in items:
        more = size(item, batch)
        if batch and (used + more > limit or not joins(item, batch)):
            yield batch
            batch, used, more = [], 0, size(item, ())
        batch.append(item)
        used += more
    if batch:
        yield batch


def one_line(error: BaseException) -> str:
    """The kind and the first line of an exception."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def run_halving(
    run: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    failed: Callable[[Item, str, str], Result],
    refused: Callable[[Item, str], Result] | None = None,
) -> list[Result]:
    """Run items together; when that fails, for want of memory or for one bad item, run each half by itself.

    An item that fails alone becomes failed(item, one-line reason, traceback); one that a rule refuses (UserError) becomes
    refused(item, reason), or fails without a traceback where nothing is given for that.
    """
    try:
        return run(items)
    except UserError as error:
        if len(items) == 1:
            return [refused(items[0], str(error)) if refused else failed(items[0], str(error), "")]
    except Exception as error:
        if len(items) == 1:
            return [failed(items[0], one_line(error), traceback.format_exc())]
    middle = len(items) // 2  # outside the handlers: the failed attempt's tensors are free again
    halves = items[:middle], items[middle:]
    return [one for half in halves for one in run_halving(run, half, failed, refused)]
