"""What one arm is asked on one example, what became of it, and how an error ends one request and no other.

Everything is token ids and stacks. A request carries its owner, which the engine only hands back.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from harness.engine.answers import Answer, Scored, TextScore
from harness.engine.batches import one_line
from harness.engine.streams import Read
from harness.errors import UserError
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from harness.types import Bytes

Owner = TypeVar("Owner")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Request(Generic[Owner]):
    """A context (`prefix`) under a stack; each kind below says what follows it.

    index, count: which of its owner's requests this is, and how many there are: a document of lm-eval asks for several.
    """

    owner: Owner
    prefix: tuple[int, ...]
    stack: Stack
    seed: int = 0
    index: int = 0
    count: int = 1

    @property
    def shared(self) -> tuple[int, ...]:
        """Tokens that neighbouring requests must agree on to share what is read of the context."""
        return self.prefix

    @property
    def budgeted(self) -> int:
        """Tokens of the context that the stack's budget is solved for."""
        return len(self.prefix)

    @property
    def growth(self) -> int:
        """Most tokens fed after the context was compressed."""
        return 0

    @property
    def length(self) -> int:
        """Most tokens fed in all; the last one of an answer or a text never is."""
        return len(self.prefix)

    @property
    def forks(self) -> int:
        """Sequence caches that follow the compressed context at once."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Question(Request[Owner]):
    """`held` tokens, then either an answer (at most `max_new` tokens) or the log-likelihood of `targets`.

    Each of the targets is scored on its own fork of the compressed context.
    """

    held: tuple[int, ...]
    max_new: int = 0
    stop: Callable[[Sequence[int]], bool] = lambda ids: False
    targets: tuple[tuple[int, ...], ...] = ()

    @property
    def growth(self) -> int:
        return len(self.held) + max([self.max_new, *map(len, self.targets)])

    @property
    def length(self) -> int:
        return len(self.prefix) + max(self.growth - 1, len(self.held))

    @property
    def forks(self) -> int:
        return max(1, len(self.targets))


@dataclass(frozen=True, kw_only=True)
class Text(Request[Owner]):
    """A text whose tokens are predicted one after another; `prefix` is its beginning, or empty."""

    ids: tuple[int, ...]

    @property
    def shared(self) -> tuple[int, ...]:
        return self.ids

    @property
    def budgeted(self) -> int:
        return len(self.prefix) or len(self.ids)

    @property
    def growth(self) -> int:
        return len(self.ids) - len(self.prefix)

    @property
    def length(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True, kw_only=True)
class Stream(Text[Owner]):
    """The text is fed in chunks and compared, token by token, with the same text under the full cache."""

    chunk: int


@dataclass(frozen=True, kw_only=True)
class WindowText(Text[Owner]):
    """One window of a text that is scored as a whole: the last `scored` ids are predicted."""

    scored: int


@dataclass(frozen=True, kw_only=True)
class Result(Generic[Owner]):
    """What became of a request; `status` is ok, refused (the reason in `error`) or failed (`trace` beside it).

    Of answer, scored, read and text the request's kind decides which is there; none is where only the context was read so far.
    """

    request: Request[Owner]
    status: str = "ok"
    error: str | None = None
    trace: str = ""
    row: SequenceCache | None = None  # as compressed, before anything was fed
    exact: SequenceCache | None = None  # the context as it was before, while a stream still needs it
    context: Bytes = field(default_factory=lambda: Bytes({}, {}))
    peak_prefill: int = 0  # exact context, statistics and compressed store, together while compressing
    answer: Answer | None = None
    scored: tuple[Scored, ...] = ()
    read: Read | None = None
    text: TextScore | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> SequenceCache:
        """The sequence cache that a request whose status is ok starts from."""
        assert self.row is not None
        return self.row

    @property
    def final(self) -> SequenceCache:
        """The sequence cache at the end; of several forks, the longest."""
        caches = [self.answer.row] if self.answer else [s.row for s in self.scored]
        return max(caches, key=lambda cache: cache.seen)

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
        """Largest bytes of the sequence cache from compression to the end."""
        return self.answer.peak if self.answer else max(self.context.total, *(s.peak for s in self.scored))


def draw_seed(ids: Sequence[int]) -> int:
    """The seed of what is drawn, from the compressed tokens alone: whoever asks, and whatever follows, meets the same store."""
    return int(hashlib.sha256(repr(tuple(ids)).encode()).hexdigest()[:12], 16)


def failed(result: Result[Owner], line: str, trace: str) -> Result[Owner]:
    """What ended in an error; `trace` is its traceback."""
    return Result(request=result.request, status="failed", error=line, trace=trace)


def refused(result: Result[Owner], line: str) -> Result[Owner]:
    """What a rule refused, in one line."""
    return Result(request=result.request, status="refused", error=line)


def ended(request: Request[Owner], error: Exception) -> Result[Owner]:
    """What a request's record says of an error: refused by a rule, or failed with a traceback."""
    if isinstance(error, UserError):
        return Result(request=request, status="refused", error=str(error))
    trace = "".join(traceback.format_exception(error))
    return Result(request=request, status="failed", error=one_line(error), trace=trace)


def attempt(request: Request[Owner], work: Callable[[], Value]) -> Value | Result[Owner]:
    """The value, or what the request's record says instead."""
    try:
        return work()
    except Exception as error:
        return ended(request, error)
