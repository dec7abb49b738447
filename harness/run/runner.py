"""Runs a task's examples through all cells: prefill once per example, rows in waves, records out. It draws nothing.

What is already in the store is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from harness.kv.cache import Row
from harness.lm.engine import Answer, Ask, Engine, Prefix
from harness.lm.load import LM
from harness.run.cells import Cell
from harness.run.identity import record_key
from harness.run.store import Store
from harness.run.waves import MOST_ROWS, Forecast, run_halving
from harness.stages.protocols import Needs
from harness.types import Bytes, Example, Prompt, Record, Task, UserError


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all records of an invocation share."""

    run_id: str
    model: str
    identity: Mapping[str, Any]  # model, code hash and library versions: part of every key
    seed: int
    memory_limit: int
    attn: str
    progress: bool = True


@dataclass(frozen=True)
class Work:
    """One record to make: an example under a cell."""

    example: Example
    prompt: Prompt
    cell: Cell
    key: str


@dataclass(frozen=True)
class Pending:
    """A row that waits for its wave, and what was measured when its context was compressed."""

    work: Work
    row: Row
    held: tuple[int, ...]
    context: Bytes
    peak_prefill: int
    forecast: int
    kept: float
    touched: int
    timings: dict[str, float] = field(default_factory=dict)


class Runner:
    """Makes the missing records of a run."""

    def __init__(self, lm: LM, engine: Engine, task: Task, cells: Sequence[Cell], store: Store, setup: Setup) -> None:
        self.lm, self.engine, self.task, self.cells, self.store, self.setup = lm, engine, task, cells, store, setup
        self.forecast = Forecast(
            shape=engine.shape,
            kv_itemsize=engine.kv_dtype.itemsize,
            itemsize=lm.model.dtype.itemsize,
            vocabulary=lm.model.config.get_text_config().vocab_size,
        )
        self.waiting: list[Pending] = []
        self.failures: list[str] = []

    def run(self, examples: Sequence[Example]) -> None:
        """All examples under all cells; every wave's records are on disk before the next wave starts."""
        todo = {i: work for i, example in enumerate(examples) if (work := self._missing(example))}
        total = sum(map(len, todo.values()))
        with tqdm(total=total, unit="rec", desc=self.setup.run_id, disable=not self.setup.progress or not total) as bar:
            for work in todo.values():
                self._example(work, bar.update)
            self._flush(bar.update)

    def _missing(self, example: Example) -> list[Work]:
        prompt = self.lm.tokens.prompt(example.context, example.question, example.answer_prefix, chat=self.task.chat)
        work = [Work(example, prompt, cell, self._key(example, prompt, cell)) for cell in self.cells]
        return [one for one in work if one.key not in self.store.done]

    def _key(self, example: Example, prompt: Prompt, cell: Cell) -> str:
        return record_key(
            {
                "example": asdict(example),
                "prompt": prompt.sha256,
                "query_aware": self.task.query_aware,
                "stack": cell.config,
                "point": cell.point,
                "label": cell.label,
                "seed": self.setup.seed,
                **self.setup.identity,
            }
        )

    def _example(self, work: Sequence[Work], done: Callable[[int], Any]) -> None:
        """One exact prefill, then a row for every cell; rows wait until their wave is full."""
        first, held = work[0].prompt.split(self.task.query_aware)
        growth = len(held) + work[0].example.max_new_tokens
        base = self.forecast.prefix(len(first))
        prefix: Prefix | None = None
        for one in work:
            try:
                size = self.forecast.row(one.cell.stack, len(first), growth)
                self._fits(base + size)
                if self.waiting and (
                    base + size + sum(p.forecast for p in self.waiting) > self.setup.memory_limit
                    or len(self.waiting) >= MOST_ROWS
                ):
                    self._flush(done)
                prefix = prefix or self._prefill(first, work)
                self.waiting.append(self._row(one, prefix, held, size))
            except UserError as error:
                self._write([self._record(one, status="refused", error=str(error))], done)

    def _fits(self, size: int) -> None:
        limit = self.setup.memory_limit
        if size > limit:
            raise UserError(f"memory_limit={limit} is too small for this example alone, which needs {size} bytes")

    def _prefill(self, ids: Sequence[int], work: Sequence[Work]) -> Prefix:
        needs = Needs()
        for one in work:
            needs = needs | one.cell.stack.needs
        return self.engine.prefill(ids, needs)

    def _row(self, work: Work, prefix: Prefix, held: tuple[int, ...], forecast: int) -> Pending:
        start = time.perf_counter()
        row = self.engine.compress(prefix, work.cell.stack, int(work.prompt.sha256[:12], 16))
        seconds = time.perf_counter() - start
        context = row.bytes()
        peak = prefix.nbytes + (context.total if work.cell.stack.compresses else 0)
        # A row that aliases the prefix keeps it alive until its wave is done.
        alive = forecast if work.cell.stack.compresses else forecast + context.total
        held_rows = [n for layer in row.held() for n in layer]
        kept = sum(held_rows) / len(held_rows)
        timings = {"prefill_s": prefix.seconds, "compress_s": seconds}
        return Pending(work, row, held, context, peak, alive, kept, row.touched(), timings)

    def _flush(self, done: Callable[[int], Any]) -> None:
        waiting, self.waiting = self.waiting, []
        if waiting:
            records = run_halving(self._wave, waiting, self._failed)
            self._write(records, done)

    def _wave(self, waiting: Sequence[Pending]) -> list[Record]:
        asks = [
            Ask(row=p.row, held=p.held, max_new=p.work.example.max_new_tokens, stop=self._stop(p.work.example)) for p in waiting
        ]
        answers = self.engine.answer(asks)
        return [self._answered(p, answer, len(waiting)) for p, answer in zip(waiting, answers, strict=True)]

    def _stop(self, example: Example) -> Callable[[Sequence[int]], bool]:
        if not example.stop:
            return lambda ids: False
        return lambda ids: self._cut(ids, example.stop)[1]

    def _cut(self, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, bool]:
        """(text before the first stop string, whether there was one); blanks in front of the answer do not stop it."""
        text = self.lm.tokens.decode(ids)
        blank = len(text) - len(text.lstrip())
        found = [at for s in stop if (at := text.find(s, blank)) >= 0]
        return (text[: min(found)], True) if found else (text, False)

    def _answered(self, p: Pending, answer: Answer, wave: int) -> Record:
        example, itemsize = p.work.example, self.forecast.kv_itemsize
        text = self._cut(answer.ids, example.stop)[0]
        score = self.task.score(example, text)
        context = self.engine.shape.full_bytes(p.row.seen, itemsize)
        nothing = p.work.cell.stack.compresses and p.touched == 0
        return self._record(
            p.work,
            status="not_exercised" if nothing else "ok",
            error="nothing was compressed: the context is not longer than what the stack keeps exactly" if nothing else None,
            output=text,
            score=score.value,
            metrics=dict(score.metrics),
            stop_reason=answer.stop_reason,
            tokens_seen=p.row.seen,
            tokens_kept=p.kept,
            entries_touched=p.touched,
            codec_info=p.row.codec_info(),
            kv_bytes_context=p.context.total,
            kv_bytes_final=answer.row.bytes().total,
            kv_bytes_peak=answer.peak,
            kv_bytes_peak_prefill=p.peak_prefill,
            kv_bytes_full=context,
            kv_bytes_full_final=self.engine.shape.full_bytes(answer.row.seen, itemsize),
            bytes=_breakdown(p.context),
            timings={**p.timings, "wave_s": answer.seconds, "wave_rows": float(wave)},
        )

    def _failed(self, p: Pending, line: str, trace: str) -> Record:
        name = f"{p.work.key[:16]}.txt"
        folder = self.store.folder / "failures"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(trace, encoding="utf-8")
        return self._record(p.work, status="failed", error=f"{line} (failures/{name})")

    def _record(self, work: Work, **fields: Any) -> Record:
        example, prompt, cell, task = work.example, work.prompt, work.cell, self.task
        shape = self.engine.shape
        return Record(
            key=work.key,
            run_id=self.setup.run_id,
            example_id=example.id,
            group_id=example.group_id or example.id,
            prompt_sha256=prompt.sha256,
            first_ids=list(prompt.ids[:4]),
            n_prompt=len(prompt.ids),
            truncated=example.truncated,
            length=example.length,
            depth=example.depth,
            model=self.setup.model,
            task=task.name,
            stack=cell.label,
            stack_config=cell.config,
            point=cell.point,
            phase=cell.stack.phase,
            query_aware=task.query_aware,
            positions=cell.stack.positions,
            attn=self.setup.attn,
            storage="packed",
            kv_dtype=str(self.engine.kv_dtype).removeprefix("torch."),
            layers_compressed=list(shape.full_layers) if cell.stack.compresses else [],
            gold=list(example.answers),
            metric=task.metric,
            chance=task.chance,
            seed=self.setup.seed,
            **fields,
        )

    def _write(self, records: Sequence[Record], done: Callable[[int], Any]) -> None:
        self.store.append(records)
        self.failures += [f"{r.stack} {r.point} {r.example_id}: {r.error}" for r in records if r.status == "failed"]
        done(len(records))


def _breakdown(total: Bytes) -> dict[str, dict[str, int]]:
    whole = total + Bytes({}, {})
    padding = {k: whole.allocated[k] - whole.logical[k] for k in whole.logical}
    logical = dict(whole.logical)
    allocated = {k: logical[k] for k in logical} | {"padding": sum(padding.values())}
    return {"logical": logical, "allocated": allocated}
