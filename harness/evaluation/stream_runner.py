"""Runs a stream task's documents through all cells and records perplexity, fidelity and curves. It draws nothing.

A document's rows share waves with a full-cache row of the same document, which fidelity is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from harness.configure.arms import Arm
from harness.engine.batches import Forecast, fill, one_line, run_halving
from harness.engine.engine import Engine
from harness.engine.logits import IMPOSSIBLE, NEVER, UNSOUND, UNSOUND_FULL
from harness.engine.scheduler import needs_of
from harness.engine.streams import Floats, Read, Reading, context_row, read
from harness.engine.time_limit import limited
from harness.errors import UserError
from harness.evaluation.recorder import Planned, Recorder, Setup, breakdown, works_of
from harness.kv.sequence_cache import SequenceCache
from harness.models.load import LM
from harness.records.store import Store
from harness.stages.stack import Stack
from harness.types import Example, Record
from tasks.stream import Stream

NOT_READ = (
    "nothing was compressed before the last token was scored: the stream is not longer than one task.chunk and what the stack "
    "keeps exactly"
)
ONCE = (
    "this stack chooses rows once (phase prefill), which a stream without a context never asks for: legal are "
    "compress.phase=always where its scorer allows it, or task.context > 0"
)

TOO_LARGE = "it is too large for a number"
MOST_NATS = 709.0  # e to more is no double


class StreamRunner:
    """Makes the missing records of a stream run."""

    def __init__(self, lm: LM, engine: Engine, task: Stream, store: Store[Planned], setup: Setup) -> None:
        self.lm, self.engine, self.task, self.store, self.setup = lm, engine, task, store, setup
        text = lm.model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.forecast = Forecast(
            shape=engine.shape,
            kv_itemsize=engine.kv_dtype.itemsize,
            itemsize=lm.model.dtype.itemsize,
            vocabulary=self.vocabulary * task.chunk,
        )

    def works(self, examples: Sequence[Example], cells: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all documents under all cells are."""
        prompts = [(e, self.lm.tokens.prompt(e.context, "", "", chat=False)) for e in examples]
        return works_of(self.setup, self.task, prompts, cells, seed)

    def recorder(self, works: Sequence[Planned]) -> Recorder:
        """What writes these records."""
        shared = {
            "higher_is_better": False,
            "aggregate": "exp_weighted",
            "chance": float(self.vocabulary),
            "chunk": self.task.chunk,
        }
        return Recorder(self.task, self.store, self.setup, works, lambda work: shared)

    def run(self, works: Sequence[Planned]) -> list[str]:
        """Make what is missing, a line for each failure; a wave's records are on disk before the next one starts."""
        with self.recorder(works) as recorder:
            for free in recorder.rounds():
                for wave in fill(self._possible(free, recorder), self._added, self.setup.memory_limit):
                    run = run_halving(lambda part: self._wave(part, recorder), wave, recorder.failed, recorder.refused)
                    recorder.write(run)
            return recorder.failures

    def _possible(self, todo: Iterable[Planned], recorder: Recorder) -> Iterator[Planned]:
        """Works whose row can be had; the others get their record at once."""
        for work in todo:
            try:
                self._size(work.cell.stack, len(work.prompt.ids))
            except UserError as error:
                recorder.write([recorder.refused(work, str(error))])
            except MemoryError as error:
                recorder.write([recorder.failed(work, one_line(error), "")])
            else:
                yield work

    def _added(self, work: Planned, wave: Sequence[Planned]) -> int:
        """Bytes that a work adds to a wave: its row's, and a reference row's if it is the first of its document."""
        total = len(work.prompt.ids)
        new = all(other.prompt.sha256 != work.prompt.sha256 for other in wave)
        return self._size(work.cell.stack, total) + (self._size(Stack(), total) if new else 0)

    def _free(self, wave: Sequence[Planned]) -> int:
        """Bytes that a wave leaves of the memory limit."""
        return max(self.setup.memory_limit - sum(self._added(work, wave[:i]) for i, work in enumerate(wave)), 0)

    def _size(self, stack: Stack, total: int) -> int:
        if stack.keep is not None and stack.phase == "prefill" and not self.task.context:
            raise UserError(ONCE)
        self.engine.check_length(total - 1)
        context = self.task.context or total
        size = self.forecast.row(stack, context, total - self.task.context)
        size += 0 if stack.compresses else self.forecast.prefix(context)
        if size > self.setup.memory_limit:
            raise MemoryError(f"memory_limit={self.setup.memory_limit} is too small: one row alone needs {size} bytes")
        return size

    def _wave(self, work: Sequence[Planned], recorder: Recorder) -> list[Record]:
        readings: list[Reading] = []
        with limited(self.engine):
            for _, same in groupby(work, key=lambda one: one.prompt.sha256):
                self._document(list(same), readings)
            done = read(self.engine, readings, self.task.chunk, self._free(work) if self.setup.views else 0)
        results = zip(readings, done, strict=True)
        return [self._finish(recorder, reading, one, len(readings)) for reading, one in results if reading.tag]

    def _document(self, work: Sequence[Planned], readings: list[Reading]) -> None:
        """One reading a cell, after a full-cache reading for reference (the full cache's own cell, when it is there)."""
        ids, at = work[0].prompt.ids, len(readings)
        prefix = None
        if self.task.context:
            needs = needs_of(one.cell.stack for one in work)
            prefix = self.engine.prefill(ids[: self.task.context], needs, len(ids) - 1)

        def row(stack: Stack, seed: int) -> tuple[SequenceCache, int]:
            if prefix is None:
                return self.engine.start(stack, len(ids), seed, len(ids) - 1), 0
            return context_row(self.engine, prefix, ids[: self.task.context], stack, seed)

        if work[0].cell.stack.compresses:
            readings.append(Reading(ids=ids, row=row(Stack(), 0)[0], reference=at))
        for one in work:
            start, peak = row(one.cell.stack, int(one.prompt.sha256[:12], 16))
            readings.append(Reading(ids=ids, row=start, reference=at, tag=one, context_peak=peak))

    def _finish(self, recorder: Recorder, reading: Reading, out: Read, wave: int) -> Record:
        work: Planned = reading.tag
        nll, row = out.curve("nll"), out.row
        if not out.sound or np.isinf(nll).any():
            return recorder.failed(work, NEVER if out.sound else UNSOUND, "")
        nothing = row.stack.compresses and out.compressed == 0
        held = [n for layer in row.held() for n in layer]
        metrics, missing = self._metrics(reading, out, nll)
        return recorder.record(
            work,
            status="not_exercised" if nothing else "ok",
            error=NOT_READ if nothing else None,
            score=float(nll.mean()),
            weight=float(len(nll)),
            metrics=metrics,
            missing=missing,
            compressed_share=out.compressed_share if row.stack.compresses else None,
            rope_length=row.length,
            tokens_seen=row.seen,
            tokens_kept=sum(held) / len(held),
            entries_touched=row.touched(),
            codec_info=row.codec_info(),
            kv_bytes_context=round(out.mean_bytes),
            kv_bytes_final=row.bytes().total,
            kv_bytes_peak=out.peak,
            kv_bytes_peak_prefill=reading.context_peak or out.peak,  # without a context all of it is read as it comes
            storage=row.storage,
            layer_budget=row.layer_budget,
            kv_bytes_full=round(out.mean_full_bytes),
            kv_bytes_full_final=self.engine.shape.full_bytes(row.seen, row.itemsize),
            bytes=breakdown(row.bytes()),
            series_path=self._series(work, nll, out),
            timings={"wave_s": out.seconds, "wave_rows": float(wave)},
        )

    def _metrics(self, reading: Reading, out: Read, nll: Floats) -> tuple[dict[str, float], dict[str, str]]:
        """The numbers beside perplexity; and, for those that cannot be had, why."""
        scored_text = self.lm.tokens.decode(reading.ids[max(self.task.context, 0) + 1 :])
        ratios = [math.sqrt(num / den) if den else 0.0 for num, den in out.errors.tolist()]
        found = {
            "perplexity": math.exp(nll.mean()) if nll.mean() < MOST_NATS else math.inf,
            "nll_per_byte": float(nll.sum()) / len(scored_text.encode()),
            "kl_to_full": float(out.curve("kl").mean()),
            "top1_agreement": float(out.curve("agree").mean()),
            "attention_error": float(np.mean(ratios)),
            "scored_tokens": float(len(nll)),
        } | {f"attention_error_layer_{i}": r for i, r in enumerate(ratios)}
        against_full = {n for n in found if n.startswith(("kl_", "top1_", "attention_"))}
        missing = {n: IMPOSSIBLE if n == "kl_to_full" else TOO_LARGE for n, x in found.items() if not math.isfinite(x)}
        missing |= {n: UNSOUND_FULL for n in against_full if not out.reference_sound}
        return {name: x for name, x in found.items() if name not in missing}, dict(sorted(missing.items()))

    def _series(self, work: Planned, nll: Floats, out: Read) -> str:
        """Write the token-by-token curves beside the records; returns the path relative to the run folder."""
        path = Path("series") / f"{work.key[:16]}.parquet"
        first = len(work.prompt.ids) - len(nll)
        frame = pd.DataFrame(
            {"position": np.arange(first, first + len(nll), dtype=np.int32), "nll": nll, "kl": out.curve("kl")}
        )
        self.store.write(path, frame.to_parquet)
        return str(path)
