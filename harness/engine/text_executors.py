"""Texts that are predicted token by token: streams, and windows of a text that is scored as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from harness.engine.answers import TextScore
from harness.engine.executor import Context, Executor, batch_timings
from harness.engine.logits import UNSOUND
from harness.engine.requests import Owner, Request, Result, Stream, WindowText, failed
from harness.engine.streams import Read, Reading, context_cache, read
from harness.engine.time_limit import limited
from harness.engine.windows import CHUNK, exact_half, rest
from harness.kv.memory import Budget
from harness.stages.stack import Stack


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
        return replace(one, read=found, exact=None, timings=batch_timings(found.seconds, together))


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
        begin, ids = self.engine.clock(), batch[0].request.shared
        with limited(self.engine):
            found = rest(self.engine, [one.start for one in batch], ids)
        timings = batch_timings(self.engine.clock() - begin, len(batch))
        return [
            replace(self._scored(one, text), scored=one.scored or (end,), timings=timings)
            if end.sound
            else failed(one, UNSOUND, "")
            for one, (text, end) in zip(batch, found, strict=True)
        ]

    def _scored(self, one: Result[Owner], text: TextScore) -> Result[Owner]:
        assert one.text is not None
        return replace(one, text=(one.text + text).last(_window(one.request).scored))


def _stream(request: Request[Owner]) -> Stream[Owner]:
    assert isinstance(request, Stream)
    return request


def _window(request: Request[Owner]) -> WindowText[Owner]:
    assert isinstance(request, WindowText)
    return request
