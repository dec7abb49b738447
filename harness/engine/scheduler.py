"""Jobs in, results out: one exact prefill per context, a row per job, rows finished in waves under a memory limit.

Everything is token ids and stacks; it knows no text, no task and no record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from operator import or_
from typing import Any

from harness.engine.answers import Ask, Prefix
from harness.engine.batches import MOST_ROWS, Forecast, run_halving
from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND
from harness.engine.requests import Request, Result, attempt, failed, refused
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack

Done = Callable[[list[Result]], Any]


@dataclass
class _Waiting:
    served: Result
    forecast: int

    @property
    def rows(self) -> int:
        return self.served.job.forks


class Scheduler:
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

    def serve(self, jobs: Iterable[Request], done: Done) -> None:
        """Run all jobs; `done` gets the results of every wave as soon as it ends, and refusals at once."""
        waiting: list[_Waiting] = []
        for (ids, _), same in groupby(jobs, key=lambda job: (job.prefix, self._length(job))):
            self._context(ids, list(same), waiting, done)
        self._flush(waiting, done)

    def _length(self, job: Request) -> int:
        """Where the model's rotation depends on it, jobs of different lengths cannot share a context; else 0 for all."""
        return job.length if self.engine.rotary is not None else 0

    def _context(self, ids: Sequence[int], jobs: list[Request], waiting: list[_Waiting], done: Done) -> None:
        """One exact prefill, then a row for every job; rows wait until their wave is full."""
        self._chunked(ids, [job for job in jobs if job.stack.chunked], waiting, done)
        jobs = [job for job in jobs if not job.stack.chunked]
        base = self.forecast.prefix(len(ids))
        prefix: Prefix | None = None
        for job in jobs:
            size = attempt(job, lambda job=job: self._size(job, len(ids), base))  # type: ignore[misc]
            if isinstance(size, Result):
                done([size])
                continue
            if waiting and (base + size + sum(w.forecast for w in waiting) > self.limit or _full(waiting, job)):
                self._flush(waiting, done, base if prefix else 0)
            if prefix is None:
                read = attempt(job, lambda: self._prefill(ids, jobs))
                if isinstance(read, Result):
                    done([replace(read, job=one) for one in jobs[jobs.index(job) :]])
                    return
                prefix = read
            served = attempt(job, lambda job=job, prefix=prefix: self._row(job, prefix))  # type: ignore[misc]
            if served.row is None:
                done([served])
                continue
            # A row that aliases the prefix keeps it alive until its wave is done.
            waiting.append(_Waiting(served, size if job.stack.compresses else size + served.context.total))

    def _prefill(self, ids: Sequence[int], jobs: Sequence[Request]) -> Prefix:
        needs, length = needs_of(job.stack for job in jobs), self._length(jobs[0])
        return self.engine.prefill(ids, needs, length) if length else self.engine.prefill(ids, needs)

    def _chunked(self, ids: Sequence[int], jobs: Sequence[Request], waiting: list[_Waiting], done: Done) -> None:
        """Rows that read the context in chunks, in lockstep: memory is bounded by their budgets from the first token on."""
        ready: list[_Waiting] = []

        def read_all() -> None:
            rows = run_halving(lambda wave: self._read(ids, wave), [one.served for one in ready], failed, refused)
            done([served for served in rows if served.status != "ok"])
            for one, served in zip(ready, rows, strict=True):
                if served.status == "ok":
                    waiting.append(_Waiting(served, one.forecast))
            ready.clear()

        for job in jobs:
            size = attempt(job, lambda job=job: self._size(job, len(ids), 0))  # type: ignore[misc]
            if isinstance(size, Result):
                done([size])
                continue
            row = attempt(job, lambda job=job: self.engine.start(job.stack, len(ids), job.seed, job.length))  # type: ignore[misc]
            if isinstance(row, Result):
                done([row])
                continue
            used = sum(one.forecast for one in [*waiting, *ready])
            if used + size > self.limit or _full([*waiting, *ready], job):
                read_all()
                self._flush(waiting, done)
            ready.append(_Waiting(Result(job=job, row=row), size))
        if ready:
            read_all()

    def _read(self, ids: Sequence[int], wave: Sequence[Result]) -> list[Result]:
        start = time.perf_counter()
        rows = self.engine.read_chunked(ids, [_row(served) for served in wave])
        timings = {"prefill_s": time.perf_counter() - start, "compress_s": 0.0}
        return [
            replace(served, row=row, context=row.bytes(), peak_prefill=peak, timings=timings)
            for served, (row, peak) in zip(wave, rows, strict=True)
        ]

    def _size(self, job: Request, context: int, base: int) -> int:
        """Bytes that a job adds to a wave: those of a row for every target, for each is scored on a fork of its own.

        Raises UserError where the model or the context does not allow it, MemoryError where it can never fit.
        """
        self.engine.check_length(job.length)
        size = job.forks * self.forecast.row(job.stack, context, job.growth)
        size += 4 * self.forecast.vocabulary * sum(len(job.held) + len(target) for target in job.targets)  # every logit
        if base + size > self.limit:
            raise MemoryError(f"memory_limit={self.limit} is too small: this example alone needs {base + size} bytes")
        return size

    def _row(self, job: Request, prefix: Prefix) -> Result:
        start = time.perf_counter()
        row = self.engine.compress(prefix, job.stack, job.seed)
        timings = {"prefill_s": prefix.seconds, "compress_s": time.perf_counter() - start}
        context = row.bytes()
        peak = prefix.nbytes(job.stack.needs) + (context.total if job.stack.compresses else 0)
        return Result(job=job, row=row, context=context, peak_prefill=peak, timings=timings)

    def _flush(self, waiting: list[_Waiting], done: Done, held: int = 0) -> None:
        """Finish all that wait; held: bytes of what stays meanwhile, a prefix. Decoded views get what they leave free."""
        rows = [w.served for w in waiting]
        room = max(self.limit - held - sum(w.forecast for w in waiting), 0) if self.views else 0
        waiting.clear()
        for wanted in (True, False):  # rows that generate step together, rows that score are fed once
            wave = [s for s in rows if (not s.job.targets) == wanted]
            if wave:
                step = partial(self._generate, room=room) if wanted else self._score
                done(run_halving(step, wave, failed, refused))

    def _generate(self, wave: Sequence[Result], room: int) -> list[Result]:
        asks = [Ask(row=_row(s), held=s.job.held, max_new=s.job.max_new, stop=s.job.stop) for s in wave]
        answers = self.engine.answer(asks, room)
        return [
            replace(s, answer=a, timings={**s.timings, "wave_s": a.seconds, "wave_rows": float(len(wave))})
            if a.stop_reason != "unsound"
            else failed(s, UNSOUND, "")
            for s, a in zip(wave, answers, strict=True)
        ]

    def _score(self, wave: Sequence[Result]) -> list[Result]:
        start = time.perf_counter()
        forks = [(_row(s), s.job.held, target) for s in wave for target in s.job.targets]
        scored = iter(self.engine.score(*map(list, zip(*forks, strict=True))))  # type: ignore[arg-type]
        results = [tuple(next(scored) for _ in s.job.targets) for s in wave]
        timings = {"wave_s": time.perf_counter() - start, "wave_rows": float(len(forks))}
        return [
            replace(s, scored=r, timings=s.timings | timings) if all(one.sound for one in r) else failed(s, UNSOUND, "")
            for s, r in zip(wave, results, strict=True)
        ]


def _row(served: Result) -> SequenceCache:
    assert served.row is not None
    return served.row


def _full(waiting: Sequence[_Waiting], job: Request) -> bool:
    """Whether a wave has no place for another job's rows."""
    return bool(waiting) and sum(one.rows for one in waiting) + job.forks > MOST_ROWS


def needs_of(stacks: Iterable[Stack]) -> Needs:
    """What one prefill must record for all of these stacks."""
    return reduce(or_, (stack.needs for stack in stacks), Needs())
