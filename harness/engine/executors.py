"""How each kind of request is read, sized and run: answers, log-likelihoods of targets, streams, windows of a text.

The scheduler decides what runs together, and what becomes of errors.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from operator import or_
from typing import ClassVar

from harness.engine.answers import Ask, Prefix, Scored, TextScore
from harness.engine.batches import MOST_TOGETHER, Forecast
from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND
from harness.engine.requests import Owner, Question, Request, Result, Stream, WindowText, failed
from harness.engine.streams import Read, Reading, context_cache, read
from harness.engine.time_limit import limited
from harness.engine.windows import CHUNK, exact_half, rest
from harness.kv.memory import Budget
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Context:
    """What is read once for all requests on one context: its exact cache, and the scores of its own tokens."""

    prefix: Prefix | None = None
    text: TextScore = field(default_factory=TextScore)
    end: Scored | None = None  # of a text that is read exactly as a whole


class Executor(ABC):
    """One kind of request. `exact`: every request of it needs the exact context, a chunked stack's too."""

    exact: ClassVar[bool] = False

    def __init__(self, engine: Engine, forecast: Forecast) -> None:
        self.engine, self.forecast = engine, forecast

    def budget(self, request: Request[Owner]) -> Budget:
        """The budget of the context; UserError when it is too small."""
        return self.forecast.solve(request.stack, request.budgeted)

    @abstractmethod
    def own(self, request: Request[Owner], budget: Budget) -> int:
        """Bytes that a request takes, whatever shares its batch."""

    def beside(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> int:
        """Bytes that are added for the sake of a request, given what is already in its batch."""
        return 0

    def base(self, request: Request[Owner]) -> int:
        """Bytes of the exact context, while requests on it start."""
        return 0

    def kept(self, request: Request[Owner]) -> int:
        """Bytes of the exact context that stay for a request until its batch has ended."""
        return 0

    def joins(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> bool:
        """Whether a request may join a batch that is not empty."""
        fits = sum(one.forks for one in batch) + request.forks <= MOST_TOGETHER
        return fits and type(request) is type(batch[0])

    def read(self, requests: Sequence[Request[Owner]]) -> Context:
        """Read the context of these requests once, exactly."""
        needs = needs_of(one.stack for one in requests)
        length = self.rotation(requests[0])
        ids = requests[0].prefix
        return Context(self.engine.prefill(ids, needs, length) if length else self.engine.prefill(ids, needs))

    def rotation(self, request: Request[Owner]) -> int:
        """Tokens of the whole text, where the model's rotation depends on it; else 0 for all."""
        return request.length if self.engine.rotary is not None else 0

    def start(self, request: Request[Owner], budget: Budget, context: Context) -> Result[Owner]:
        """A request whose context is compressed."""
        begin, prefix = time.perf_counter(), context.prefix
        assert prefix is not None
        cache = self.engine.compress(prefix, request.stack, request.seed, budget)
        timings = {"prefill_s": prefix.seconds, "compress_s": time.perf_counter() - begin}
        held = cache.bytes()
        peak = prefix.nbytes(request.stack.needs) + (held.total if request.stack.compresses else 0)
        return Result(request=request, row=cache, context=held, peak_prefill=peak, timings=timings)

    @abstractmethod
    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        """What becomes of started requests that run together; views: bytes for decoded copies, which change no bit."""


class Questions(Executor):
    """What answers and targets have in common."""

    def own(self, request: Request[Owner], budget: Budget) -> int:
        """Bytes of a sequence cache for every target, for each is scored on a fork of its own, and of every logit."""
        asked = _question(request)
        size = asked.forks * self.forecast.cache(asked.stack, budget, asked.budgeted, asked.growth)
        return size + 4 * self.forecast.vocabulary * sum(len(asked.held) + len(target) for target in asked.targets)

    def base(self, request: Request[Owner]) -> int:
        return 0 if request.stack.chunked else self.forecast.prefix(len(request.prefix))

    def kept(self, request: Request[Owner]) -> int:
        """A cache that nothing is lost of keeps the prefix alive."""
        return 0 if request.stack.compresses else self.forecast.prefix(len(request.prefix))


class Answers(Questions):
    """Greedy decoding."""

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        asks = [
            Ask(row=one.start, held=asked.held, max_new=asked.max_new, stop=asked.stop)
            for one in batch
            for asked in (_question(one.request),)
        ]
        answers = self.engine.answer(asks, views)
        return [
            replace(one, answer=a, timings=one.timings | _timings(a.seconds, len(batch)))
            if a.stop_reason != "unsound"
            else failed(one, UNSOUND, "")
            for one, a in zip(batch, answers, strict=True)
        ]


class Targets(Questions):
    """The log-likelihood of given continuations."""

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        begin = time.perf_counter()
        asked = [(one, _question(one.request)) for one in batch]
        forks = [(one.start, question.held, target) for one, question in asked for target in question.targets]
        scores = iter(
            self.engine.score([cache for cache, *_ in forks], [held for _, held, _ in forks], [target for *_, target in forks])
        )
        found = [tuple(next(scores) for _ in question.targets) for _, question in asked]
        timings = _timings(time.perf_counter() - begin, len(forks))
        return [
            replace(one, scored=scored, timings=one.timings | timings)
            if all(score.sound for score in scored)
            else failed(one, UNSOUND, "")
            for one, scored in zip(batch, found, strict=True)
        ]


class Streams(Executor):
    """Texts fed chunk by chunk; a text's requests share their batch with one that keeps everything, to compare with."""

    exact = True

    def own(self, request: Request[Owner], budget: Budget) -> int:
        return self._size(_stream(request), request.stack, budget)

    def beside(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> int:
        """Bytes of the full cache to compare with, for the first of a text."""
        if any(other.shared == request.shared for other in batch):
            return 0
        return self._size(_stream(request), Stack(), Budget(None))

    def _size(self, request: Stream[Owner], stack: Stack, budget: Budget) -> int:
        size = self.forecast.cache(stack, budget, request.budgeted, request.growth, request.chunk)
        return size + (0 if stack.compresses else self.forecast.prefix(request.budgeted))

    def joins(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> bool:
        return super().joins(request, batch) and _stream(request).chunk == _stream(batch[0]).chunk

    def read(self, requests: Sequence[Request[Owner]]) -> Context:
        return super().read(requests) if requests[0].prefix else Context()

    def start(self, request: Request[Owner], budget: Budget, context: Context) -> Result[Owner]:
        if context.prefix is None:
            tokens = request.budgeted
            cache = self.engine.start(request.stack, tokens, request.seed, request.length, budget)
            return Result(request=request, row=cache, exact=self.engine.start(length=request.length))
        cache, peak = context_cache(self.engine, context.prefix, request.prefix, request.stack, request.seed, budget)
        exact = self.engine.compress(context.prefix, Stack())
        return Result(request=request, row=cache, exact=exact, peak_prefill=peak)

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        readings: list[Reading] = []
        places: list[int] = []
        for ids, group in groupby(batch, key=lambda one: one.request.shared):
            same, reference = list(group), len(readings)
            if same[0].request.stack.compresses:  # else the full cache's own request is what the others are compared with
                assert same[0].exact is not None
                readings.append(Reading(ids=ids, row=same[0].exact, reference=reference))
            for one in same:
                places.append(len(readings))
                readings.append(Reading(ids=ids, row=one.start, reference=reference))
        with limited(self.engine):
            found = read(self.engine, readings, _stream(batch[0].request).chunk, views)
        return [self._read(one, found[at], len(readings)) for one, at in zip(batch, places, strict=True)]

    def _read(self, one: Result[Owner], found: Read, together: int) -> Result[Owner]:
        return replace(one, read=found, exact=None, timings=_timings(found.seconds, together))


class Windows(Executor):
    """Windows of a text: the first half is read exactly, the second through the compressed store, in chunks."""

    exact = True

    def own(self, request: Request[Owner], budget: Budget) -> int:
        size = self.forecast.cache(request.stack, budget, request.budgeted, request.growth)
        return size + 3 * CHUNK * 4 * self.forecast.vocabulary

    def joins(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> bool:
        """Those of one window are fed the same tokens, and none beside them."""
        return super().joins(request, batch) and request.shared == batch[0].shared

    def budget(self, request: Request[Owner]) -> Budget:
        return super().budget(request) if request.prefix else Budget(None)

    def read(self, requests: Sequence[Request[Owner]]) -> Context:
        first = requests[0]
        text, end = exact_half(self.engine, first.shared, len(first.prefix))
        return replace(super().read(requests), text=text) if first.prefix else Context(text=text, end=end)

    def start(self, request: Request[Owner], budget: Budget, context: Context) -> Result[Owner]:
        if context.end is not None:
            cache, held = context.end.row, context.end.row.bytes()
            return Result(
                request=request, row=cache, context=held, peak_prefill=held.total, scored=(context.end,), text=context.text
            )
        assert context.prefix is not None
        cache, peak = context_cache(self.engine, context.prefix, request.prefix, request.stack, request.seed, budget)
        return Result(request=request, row=cache, context=cache.bytes(), peak_prefill=peak, text=context.text)

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        begin, ids = time.perf_counter(), batch[0].request.shared
        with limited(self.engine):
            found = rest(self.engine, [one.start for one in batch], ids)
        timings = _timings(time.perf_counter() - begin, len(batch))
        return [
            replace(self._scored(one, text), scored=one.scored or (end,), timings=timings)
            if end.sound
            else failed(one, UNSOUND, "")
            for one, (text, end) in zip(batch, found, strict=True)
        ]

    def _scored(self, one: Result[Owner], text: TextScore) -> Result[Owner]:
        assert one.text is not None
        return replace(one, text=(one.text + text).last(_window(one.request).scored))


def needs_of(stacks: Iterable[Stack]) -> Needs:
    """What one prefill must record for all of these stacks."""
    return reduce(or_, (stack.needs for stack in stacks), Needs())


def _timings(seconds: float, together: int) -> dict[str, float]:
    """Of a batch, under the names that records have."""
    return {"wave_s": seconds, "wave_rows": float(together)}


def _question(request: Request[Owner]) -> Question[Owner]:
    assert isinstance(request, Question)
    return request


def _stream(request: Request[Owner]) -> Stream[Owner]:
    assert isinstance(request, Stream)
    return request


def _window(request: Request[Owner]) -> WindowText[Owner]:
    assert isinstance(request, WindowText)
    return request
