"""Requests in, results out: one exact prefill per context, batches under a memory limit, halved where they fail.

A request that a rule refuses, or that fails, ends alone; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Generic

from harness.engine.batches import Forecast, fill, run_halving
from harness.engine.engine import Engine
from harness.engine.executor import Context, Executor
from harness.engine.question_executors import Answers, Targets
from harness.engine.requests import Owner, Question, Request, Result, Stream, attempt, failed, refused
from harness.engine.text_executors import Streams, Windows
from harness.kv.memory import Budget


@dataclass(frozen=True, kw_only=True)
class _Sized(Generic[Owner]):
    """A request with its budget, solved, and the requests that share its context; `ended` is there where it cannot run."""

    request: Request[Owner]
    context: int  # the number of its context
    sharers: tuple[Request[Owner], ...]  # all that read the same prefix
    budget: Budget = Budget(None)  # noqa: RUF009 frozen
    own: int = 0  # bytes, whatever shares its batch
    ended: Result[Owner] | None = None


class Scheduler:
    """Runs requests through an engine; those on one context must be neighbours to share its prefill.

    views: whether decoded copies of the stores may take what a batch leaves of the memory limit.
    """

    def __init__(self, engine: Engine, memory_limit: int, *, views: bool = True) -> None:
        self.engine, self.limit, self.views = engine, memory_limit, views
        self.forecast = Forecast(
            shape=engine.shape,
            kv_itemsize=engine.kv_dtype.itemsize,
            itemsize=engine.model.dtype.itemsize,
            vocabulary=engine.model.config.get_text_config().vocab_size,
        )
        kinds = (Answers, Targets, Streams, Windows)
        self.answers, self.targets, self.streams, self.windows = (kind(engine, self.forecast) for kind in kinds)

    def run(self, requests: Iterable[Request[Owner]]) -> Iterator[list[Result[Owner]]]:
        """The results of every batch as soon as it ends; nothing of the next one starts before they are taken.

        Requests are read as they are needed, one context further than the batch that runs.
        """
        starter: _Starter[Owner] = _Starter(self)
        for batch in fill(self._sized(requests), self._added, self.limit, self._joins):
            yield from self._batch(batch, starter)

    def _batch(self, batch: Sequence[_Sized[Owner]], starter: _Starter[Owner]) -> Iterator[list[Result[Owner]]]:
        started = [one for _, same in groupby(batch, key=lambda one: one.context) for one in starter.start(list(same))]
        if ended := [one for one in started if one.status != "ok"]:
            yield ended
        going = [sized for sized, one in zip(batch, started, strict=True) if one.status == "ok"]
        free = self.limit - self.engine.packed - starter.held - self._taken(going)
        views = max(free, 0) if self.views else 0
        for executor in (self.answers, self.targets, self.streams, self.windows):
            if mine := [one for one in started if one.status == "ok" and self.executor(one.request) is executor]:
                yield run_halving(partial(executor.run, views=views), mine, failed, refused)

    def executor(self, request: Request[Owner]) -> Executor:
        """What runs this kind of request."""
        if isinstance(request, Question):
            return self.targets if request.targets else self.answers
        return self.streams if isinstance(request, Stream) else self.windows

    def size(self, request: Request[Owner]) -> tuple[Budget, int]:
        """The budget of a request and the bytes that it takes.

        Raises:
            UserError: the model or the context does not allow it.
            MemoryError: it can never fit.
        """
        self.engine.check_length(request.length)
        executor = self.executor(request)
        budget = executor.budget(request)
        own = executor.own(request, budget)
        alone = own + executor.base(request)
        if alone > self.limit:
            raise MemoryError(f"memory_limit={self.limit} is too small: this example alone needs {alone} bytes")
        return budget, own

    def _sized(self, requests: Iterable[Request[Owner]]) -> Iterator[_Sized[Owner]]:
        """Requests in order, but those of a context that need no exact prefix before the others."""
        for number, (_, group) in enumerate(groupby(requests, key=self._shared)):
            same = sorted(group, key=self.needs_prefix)
            sharers = tuple(one for one in same if self.needs_prefix(one))
            for request in same:
                found = attempt(request, partial(self.size, request))
                if isinstance(found, Result):
                    yield _Sized(request=request, context=number, sharers=sharers, ended=found)
                else:
                    yield _Sized(request=request, context=number, sharers=sharers, budget=found[0], own=found[1])

    def needs_prefix(self, request: Request[Owner]) -> bool:
        """Whether the exact context is read for a request: not where its stack reads it in chunks."""
        return self.executor(request).exact or not request.stack.chunked

    def _shared(self, request: Request[Owner]) -> tuple[tuple[int, ...], int, bool]:
        """What neighbours must have in common to share what is read; where the rotation depends on the length, that too."""
        executor = self.executor(request)
        return request.shared, executor.rotation(request), executor.exact

    def _added(self, one: _Sized[Owner], batch: Sequence[_Sized[Owner]]) -> int:
        """Bytes that a request adds: its own, and its exact context instead of the one before."""
        if one.ended:
            return 0
        going = [other for other in batch if not other.ended]
        executor = self.executor(one.request)
        more = one.own + executor.base(one.request) + executor.beside(one.request, [other.request for other in going])
        if going:
            last = going[-1].request
            more += self.executor(last).kept(last) - self.executor(last).base(last)
        return more

    def _taken(self, batch: Sequence[_Sized[Owner]]) -> int:
        """Bytes that started requests take, a context that requests still start from not among them."""
        total = 0
        for at, one in enumerate(batch):
            executor = self.executor(one.request)
            beside = executor.beside(one.request, [other.request for other in batch[:at]])
            total += one.own + beside + executor.kept(one.request)
        return total

    def _joins(self, one: _Sized[Owner], batch: Sequence[_Sized[Owner]]) -> bool:
        return self.executor(one.request).joins(one.request, [other.request for other in batch])


class _Starter(Generic[Owner]):
    """Starts requests on their contexts. The context that was read last stays in memory until its last request has started,
    so that it is read once for all arms, even where they are more than a batch. held: its bytes.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.held = scheduler, 0
        self._number = -1
        self._context: Context | Result[Owner] | None = None

    def start(self, batch: Sequence[_Sized[Owner]]) -> list[Result[Owner]]:
        """Requests on one context, started, or ended where they cannot be."""
        chunked = [not one.ended and not self.scheduler.needs_prefix(one.request) for one in batch]
        read = iter(self._in_chunks([one for one, apart in zip(batch, chunked, strict=True) if apart]))
        started = [next(read) if apart else self._one(one) for one, apart in zip(batch, chunked, strict=True)]
        last = batch[-1]
        if not last.sharers or last.request is last.sharers[-1]:
            self._context, self.held = None, 0
        return started

    def _one(self, one: _Sized[Owner]) -> Result[Owner]:
        if one.ended:
            return one.ended
        executor = self.scheduler.executor(one.request)
        context = self._read(one, executor)
        if isinstance(context, Result):
            return replace(context, request=one.request)
        return attempt(one.request, lambda: executor.start(one.request, one.budget, context))

    def _read(self, one: _Sized[Owner], executor: Executor) -> Context | Result[Owner]:
        """The exact context, or what became of reading it."""
        if self._number != one.context or self._context is None:
            self._context = None  # the one before goes first
            self._number, self.held = one.context, executor.base(one.request)
            self._context = attempt(one.request, lambda: executor.read(one.sharers))
        return self._context

    def _in_chunks(self, batch: Sequence[_Sized[Owner]]) -> list[Result[Owner]]:
        """Requests that read their context in chunks, in lockstep: memory is bounded by their budgets from the first token."""
        begun = [attempt(one.request, partial(self._empty, one)) for one in batch]
        fine = [one for one in begun if one.status == "ok"]
        read = iter(run_halving(self._chunks, fine, failed, refused) if fine else [])
        return [next(read) if one.status == "ok" else one for one in begun]

    def _empty(self, one: _Sized[Owner]) -> Result[Owner]:
        asked = one.request
        cache = self.scheduler.engine.start(asked.stack, len(asked.prefix), asked.seed, asked.length, one.budget)
        return Result(request=asked, row=cache)

    def _chunks(self, batch: Sequence[Result[Owner]]) -> list[Result[Owner]]:
        begin = time.perf_counter()
        found = self.scheduler.engine.read_chunked(batch[0].request.prefix, [one.start for one in batch])
        timings = {"prefill_s": time.perf_counter() - begin, "compress_s": 0.0}
        return [
            replace(one, row=cache, context=cache.bytes(), peak_prefill=peak, timings=timings)
            for one, (cache, peak) in zip(batch, found, strict=True)
        ]
