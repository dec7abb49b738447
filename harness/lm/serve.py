"""Jobs in, results out: one exact prefill per context, a row per job, rows finished in waves under a memory limit.

Everything is token ids and stacks; it knows no text, no task and no record.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import groupby
from operator import or_
from typing import Any, TypeVar

from harness.kv.cache import Row
from harness.lm.engine import Answer, Ask, Engine, Prefix, Scored
from harness.lm.waves import MOST_ROWS, Forecast, one_line, run_halving
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from harness.types import Bytes, UserError


@dataclass(frozen=True, kw_only=True)
class Job:
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


@dataclass(frozen=True, kw_only=True)
class Served:
    """What became of a job; `status` is ok, refused (the reason in `error`) or failed (`trace` beside it)."""

    job: Job
    status: str = "ok"
    error: str | None = None
    trace: str = ""
    row: Row | None = None  # as compressed, before anything was fed
    context: Bytes = field(default_factory=lambda: Bytes({}, {}))
    peak_prefill: int = 0  # exact context, statistics and compressed store, together while compressing
    answer: Answer | None = None
    scored: tuple[Scored, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def final(self) -> Row:
        """The row at the end; of several forks, the longest."""
        rows = [self.answer.row] if self.answer else [s.row for s in self.scored]
        return max(rows, key=lambda row: row.seen)

    @property
    def peak(self) -> int:
        """Largest bytes of the row from compression to the end."""
        return self.answer.peak if self.answer else max(self.context.total, *(s.row.bytes().total for s in self.scored))


Done = Callable[[list[Served]], Any]
Value = TypeVar("Value")


@dataclass
class _Waiting:
    served: Served
    forecast: int


class Server:
    """Serves jobs through an engine; jobs on one context must stand together to share its prefill.

    views: whether decoded copies of the stores may take what a wave leaves of the memory limit.
    """

    def __init__(self, engine: Engine, memory_limit: int, *, views: bool = True) -> None:
        self.engine, self.limit, self.views = engine, memory_limit, views
        text = engine.model.config.get_text_config()
        self.forecast = Forecast(
            shape=engine.shape,
            kv_itemsize=engine.kv_dtype.itemsize,
            itemsize=engine.model.dtype.itemsize,
            vocabulary=text.vocab_size,
        )

    def serve(self, jobs: Iterable[Job], done: Done) -> None:
        """Run all jobs; `done` gets the results of every wave as soon as it ends, and refusals at once."""
        waiting: list[_Waiting] = []
        for ids, same in groupby(jobs, key=lambda job: job.prefix):
            self._context(ids, list(same), waiting, done)
        self._flush(waiting, done)

    def _context(self, ids: Sequence[int], jobs: list[Job], waiting: list[_Waiting], done: Done) -> None:
        """One exact prefill, then a row for every job; rows wait until their wave is full."""
        self._chunked(ids, [job for job in jobs if job.stack.chunked], waiting, done)
        jobs = [job for job in jobs if not job.stack.chunked]
        base = self.forecast.prefix(len(ids))
        prefix: Prefix | None = None
        for job in jobs:
            size = _attempt(job, lambda job=job: self._size(job, len(ids), base))  # type: ignore[misc]
            if isinstance(size, Served):
                done([size])
                continue
            if waiting and (base + size + sum(w.forecast for w in waiting) > self.limit or len(waiting) >= MOST_ROWS):
                self._flush(waiting, done, base if prefix else 0)
            if prefix is None:
                read = _attempt(job, lambda: self.engine.prefill(ids, needs_of(one.stack for one in jobs)))
                if isinstance(read, Served):
                    done([replace(read, job=one) for one in jobs[jobs.index(job) :]])
                    return
                prefix = read
            served = _attempt(job, lambda job=job, prefix=prefix: self._row(job, prefix))  # type: ignore[misc]
            if served.row is None:
                done([served])
                continue
            # A row that aliases the prefix keeps it alive until its wave is done.
            waiting.append(_Waiting(served, size if job.stack.compresses else size + served.context.total))

    def _chunked(self, ids: Sequence[int], jobs: Sequence[Job], waiting: list[_Waiting], done: Done) -> None:
        """Rows that read the context in chunks, in lockstep: memory is bounded by their budgets from the first token on."""
        ready: list[_Waiting] = []

        def read_all() -> None:
            rows = run_halving(lambda wave: self._read(ids, wave), [one.served for one in ready], _failed)
            done([served for served in rows if served.status != "ok"])
            for one, served in zip(ready, rows, strict=True):
                if served.status == "ok":
                    waiting.append(_Waiting(served, one.forecast))
            ready.clear()

        for job in jobs:
            size = _attempt(job, lambda job=job: self._size(job, len(ids), 0))  # type: ignore[misc]
            if isinstance(size, Served):
                done([size])
                continue
            row = _attempt(job, lambda job=job: self.engine.start(job.stack, len(ids), job.seed))  # type: ignore[misc]
            if isinstance(row, Served):
                done([row])
                continue
            used = sum(one.forecast for one in [*waiting, *ready])
            if used + size > self.limit or len(waiting) + len(ready) >= MOST_ROWS:
                read_all()
                self._flush(waiting, done)
            ready.append(_Waiting(Served(job=job, row=row), size))
        if ready:
            read_all()

    def _read(self, ids: Sequence[int], wave: Sequence[Served]) -> list[Served]:
        start = time.perf_counter()
        rows = self.engine.read_chunked(ids, [_row(served) for served in wave])
        timings = {"prefill_s": time.perf_counter() - start, "compress_s": 0.0}
        return [
            replace(served, row=row, context=row.bytes(), peak_prefill=peak, timings=timings)
            for served, (row, peak) in zip(wave, rows, strict=True)
        ]

    def _size(self, job: Job, context: int, base: int) -> int:
        size = self.forecast.row(job.stack, context, job.growth)
        size += 4 * self.forecast.vocabulary * sum(len(job.held) + len(target) for target in job.targets)  # every logit
        if base + size > self.limit:
            raise MemoryError(f"memory_limit={self.limit} is too small: this example alone needs {base + size} bytes")
        return size

    def _row(self, job: Job, prefix: Prefix) -> Served:
        start = time.perf_counter()
        row = self.engine.compress(prefix, job.stack, job.seed)
        timings = {"prefill_s": prefix.seconds, "compress_s": time.perf_counter() - start}
        context = row.bytes()
        peak = prefix.nbytes(job.stack.needs) + (context.total if job.stack.compresses else 0)
        return Served(job=job, row=row, context=context, peak_prefill=peak, timings=timings)

    def _flush(self, waiting: list[_Waiting], done: Done, held: int = 0) -> None:
        """Finish all that wait; held: bytes of what stays meanwhile, a prefix. Decoded views get what they leave free."""
        rows = [w.served for w in waiting]
        room = max(self.limit - held - sum(w.forecast for w in waiting), 0) if self.views else 0
        waiting.clear()
        for wanted in (True, False):  # rows that generate step together, rows that score are fed once
            wave = [s for s in rows if (not s.job.targets) == wanted]
            if wave:
                done(run_halving(partial(self._generate, room=room) if wanted else self._score, wave, _failed))

    def _generate(self, wave: Sequence[Served], room: int) -> list[Served]:
        asks = [Ask(row=_row(s), held=s.job.held, max_new=s.job.max_new, stop=s.job.stop) for s in wave]
        answers = self.engine.answer(asks, room)
        return [
            replace(s, answer=a, timings={**s.timings, "wave_s": a.seconds, "wave_rows": float(len(wave))})
            for s, a in zip(wave, answers, strict=True)
        ]

    def _score(self, wave: Sequence[Served]) -> list[Served]:
        start = time.perf_counter()
        forks = [(_row(s), s.job.held, target) for s in wave for target in s.job.targets]
        scored = iter(self.engine.score(*map(list, zip(*forks, strict=True))))  # type: ignore[arg-type]
        results = [tuple(next(scored) for _ in s.job.targets) for s in wave]
        timings = {"wave_s": time.perf_counter() - start, "wave_rows": float(len(forks))}
        return [replace(s, scored=r, timings=s.timings | timings) for s, r in zip(wave, results, strict=True)]


def _row(served: Served) -> Row:
    assert served.row is not None
    return served.row


def needs_of(stacks: Iterable[Stack]) -> Needs:
    """What one prefill must record for all of these stacks."""
    return reduce(or_, (stack.needs for stack in stacks), Needs())


def _failed(served: Served, line: str, trace: str) -> Served:
    return Served(job=served.job, status="failed", error=line, trace=trace)


def _attempt(job: Job, work: Callable[[], Value]) -> Value | Served:
    """The value, or what the job's record says instead: refused by a rule, or failed with a traceback."""
    try:
        return work()
    except UserError as error:
        return Served(job=job, status="refused", error=str(error))
    except Exception as error:
        return Served(job=job, status="failed", error=one_line(error), trace=traceback.format_exc())
