"""One sequence under one stack, alone: read, compressed, and decoded token by token, with the clock at each end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.engine.answers import Prefix
from harness.engine.batches import one_line
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from harness.timing.transients import transient_bytes


@dataclass(frozen=True)
class Once:
    """Seconds of one repeat.

    Attributes:
        prefill: reading the context; for a stack that compresses while it reads, that too.
        compress: compressing what was read.
        first: feeding the last token of the prompt, until the first token of the answer is known.
        decode: all further tokens of the answer.
        tokens: how many these are.
    """

    prefill: float
    compress: float
    first: float
    decode: float
    tokens: int

    @property
    def to_first(self) -> float:
        """Time to the first token."""
        return self.prefill + self.compress + self.first

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return self.tokens / self.decode


@dataclass
class Timed:
    """What was measured of one arm.

    Attributes:
        repeats: in the order they were run.
        held: bytes of its cache after the context.
        transient_read, transient_decode: bytes taken beside what stays, by reading and compressing the context and by a
            decoding step; None where the device does not tell.
        error: why there is nothing.
    """

    repeats: list[Once] = field(default_factory=list)
    held: int = 0
    transient_read: int | None = None
    transient_decode: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a context with the one that is held back, and how many tokens the answer has."""

    ids: tuple[int, ...]
    new: int

    @property
    def context(self) -> tuple[int, ...]:
        return self.ids[:-1]

    @property
    def held_back(self) -> tuple[int, ...]:
        return self.ids[-1:]

    @property
    def length(self) -> int:
        """Tokens that are fed in all, where a rotation depends on it."""
        return len(self.ids) + self.new


@dataclass(frozen=True)
class Stopwatch:
    """Measures stacks one by one: what an engine does for a single sequence, nothing shared and no decoded views kept."""

    engine: Engine
    prompt: Prompt

    def measure(self, stacks: Mapping[str, Stack], *, repeats: int, warm_up: int) -> dict[str, Timed]:
        """Repeat by repeat, every stack in turn, so that a slow minute of the machine meets all of them.

        What a stack refuses or fails at is its error, and no other's.
        """
        found = {name: Timed() for name in stacks}
        for number in range(warm_up + repeats):
            for name, stack in stacks.items():
                self._watched(found[name], stack, kept=number >= warm_up)
        return found

    def _watched(self, one: Timed, stack: Stack, *, kept: bool) -> None:
        if one.error:
            return
        try:
            if not kept or one.repeats:
                once, held = self._once(stack)
            else:  # after the warm-up, before the first repeat that counts
                self._transients(one, stack)
                once, held = self._once(stack)
            if kept:
                one.repeats.append(once)
                one.held = held
        except UserError as error:
            one.error = str(error)
        except (RuntimeError, MemoryError, ValueError, ArithmeticError) as error:
            one.error = one_line(error)

    def _once(self, stack: Stack) -> tuple[Once, int]:
        """One repeat, and the bytes that its cache holds after the context."""
        clock, marks = self.engine.clock, [self.engine.clock()]
        if stack.chunked:
            cache = self._compressed(stack)
            marks += [clock()] * 2
        else:
            prefix = self._prefix(stack)
            marks.append(clock())
            cache = self.engine.compress(prefix, stack)
            del prefix  # of a stack that loses something nothing of it is needed any more
            marks.append(clock())
        held = cache.bytes().total
        cache, token = self._step(cache, self.prompt.held_back)
        marks.append(clock())
        for _ in range(self.prompt.new - 1):
            cache, token = self._step(cache, [token])
        marks.append(clock())
        prefill, compress, first, decode = (after - before for before, after in itertools.pairwise(marks))
        return Once(prefill, compress, first, decode, self.prompt.new - 1), held

    def _transients(self, one: Timed, stack: Stack) -> None:
        device = self.engine.device
        caches: list[SequenceCache] = []
        one.transient_read = transient_bytes(lambda: caches.append(self._compressed(stack)), device)
        cache, token = self._step(caches.pop(), self.prompt.held_back)
        one.transient_decode = transient_bytes(lambda: self._step(cache, [token]), device)

    def _compressed(self, stack: Stack) -> SequenceCache:
        if not stack.chunked:
            return self.engine.compress(self._prefix(stack), stack)
        context, length = self.prompt.context, self.prompt.length
        empty = self.engine.start(stack, len(context), length=length)
        return self.engine.read_chunked(context, [empty])[0][0]

    def _prefix(self, stack: Stack) -> Prefix:
        return self.engine.prefill(self.prompt.context, stack.needs, self.prompt.length)

    def _step(self, cache: SequenceCache, ids: Sequence[int]) -> tuple[SequenceCache, int]:
        """Feed tokens; the cache afterwards and the most likely next token, which the host has then."""
        (cache,), logits = self.engine.feed([cache], [ids])
        return cache, int(logits.argmax(-1))
