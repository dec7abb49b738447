"""What an engine's server is asked and what became of it: a job, its result, and how an error ends one and no other.

Everything is token ids and stacks; it knows no text, no task and no record.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from harness.engine.answers import Answer, Scored
from harness.engine.batches import one_line
from harness.errors import UserError
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from harness.types import Bytes

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A context, a stack, and what follows: `held` tokens, then either generation or the log-likelihood of `targets`.

    Each of the targets is scored on its own fork of the compressed context. `tag` is the caller's.
    """

    prefix: tuple[int, ...]
    stack: Stack
    held: tuple[int, ...]
    max_new: int = 0
    stop: Callable[[Sequence[int]], bool] = lambda ids: False
    targets: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    tag: Any = None

    @property
    def growth(self) -> int:
        """Most tokens fed after the context was compressed."""
        return len(self.held) + max([self.max_new, *map(len, self.targets)])

    @property
    def length(self) -> int:
        """Most tokens fed in all; the last one of an answer never is."""
        return len(self.prefix) + max(self.growth - 1, len(self.held))

    @property
    def forks(self) -> int:
        """Rows that follow the compressed context at once: one, or one a target."""
        return max(1, len(self.targets))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a job; `status` is ok, refused (the reason in `error`) or failed (`trace` beside it)."""

    job: Request
    status: str = "ok"
    error: str | None = None
    trace: str = ""
    row: SequenceCache | None = None  # as compressed, before anything was fed
    context: Bytes = field(default_factory=lambda: Bytes({}, {}))
    peak_prefill: int = 0  # exact context, statistics and compressed store, together while compressing
    answer: Answer | None = None
    scored: tuple[Scored, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def final(self) -> SequenceCache:
        """The row at the end; of several forks, the longest."""
        rows = [self.answer.row] if self.answer else [s.row for s in self.scored]
        return max(rows, key=lambda row: row.seen)

    @property
    def touched(self) -> int:
        """Entries evicted or stored inexactly in the store that the last token of the answer was predicted from."""
        if self.answer:
            return self.answer.touched
        return self.row.touched() if self.row else 0  # targets are fed at once: they read the context as compressed

    @property
    def entries(self) -> int:
        """Entries evicted or stored inexactly after the context, or by the end of the answer where none were by then."""
        return (self.row.touched() if self.row else 0) or self.touched

    @property
    def peak(self) -> int:
        """Largest bytes of the row from compression to the end."""
        return self.answer.peak if self.answer else max(self.context.total, *(s.peak for s in self.scored))


def lot(ids: Sequence[int]) -> int:
    """The seed of what is drawn, from the compressed tokens alone: whoever asks, and whatever follows, meets the same store."""
    return int(hashlib.sha256(repr(tuple(ids)).encode()).hexdigest()[:12], 16)


def failed(served: Result, line: str, trace: str) -> Result:
    """What ended in an error; `trace` is its traceback."""
    return Result(job=served.job, status="failed", error=line, trace=trace)


def refused(served: Result, line: str) -> Result:
    """What a rule refused, in one line."""
    return Result(job=served.job, status="refused", error=line)


def ended(job: Request, error: Exception) -> Result:
    """What a job's record says of an error: refused by a rule, or failed with a traceback."""
    if isinstance(error, UserError):
        return Result(job=job, status="refused", error=str(error))
    trace = "".join(traceback.format_exception(error))
    return Result(job=job, status="failed", error=one_line(error), trace=trace)


def attempt(job: Request, work: Callable[[], Value]) -> Value | Result:
    """The value, or what the job's record says instead."""
    try:
        return work()
    except Exception as error:
        return ended(job, error)
