"""Runs lm-eval's documents through all cells, records them, and keeps lm-eval's own results beside the records.

What is already in the store is not done again; lm-eval's results are made from the records of all writers.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from harness.configure.arms import Arm
from harness.engine.batches import MOST_ROWS
from harness.engine.engine import Engine
from harness.errors import UserError, require
from harness.evaluation.recorder import NOTHING, Planned, Recorder, Setup, cell_part
from harness.files.digests import digest
from harness.files.plain_files import say_once
from harness.lm_eval.documents import Asked, LmEvalService, Replied
from harness.lm_eval.encoding import Encoder, LmEvalRequest, generation_limits, prompt_hash
from harness.lm_eval.metrics import aggregate, chance, from_output, judge, to_output
from harness.models.load import LM
from harness.records.store import Store
from harness.types import Example, Prompt, Record
from tasks.lm_eval_task import FIRST, Document, LmEval

BUNDLE = 4 * MOST_ROWS  # records asked for at once: what is not asked for is free for other writers
NOT_READ = "compression cannot act: a text this short, or without a context, is read exactly"


@dataclass(frozen=True)
class LmEvalWork(Planned):
    """A document under a cell, with its requests."""

    document: Document
    requests: tuple[LmEvalRequest, ...]


class LmEvalRunner:
    """Makes the missing records of a run of lm-eval tasks."""

    def __init__(self, lm: LM, engine: Engine, task: LmEval, store: Store[Planned], setup: Setup) -> None:
        self.lm, self.task, self.store, self.setup = lm, task, store, setup
        limit = lm.tokens.max_length
        require(limit is not None, "model", setup.model, "lm-eval needs to know how many positions it has")
        self.encode = Encoder(lm.tokens, int(limit or 0), task.truncate)
        self.service = LmEvalService(engine, lm.tokens, setup.memory_limit, views=setup.views)
        self.vocabulary = int(engine.model.config.get_text_config().vocab_size)

    def works(self, examples: Sequence[Example], cells: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all documents under all cells are."""
        for name, task in self.task.loaded.tasks.items():
            has = self.task.metric in (FIRST, *task.aggregation())
            require(has, "task.metric", self.task.metric, f"{name} gives {', '.join(task.aggregation())}")
        configs = {name: digest(task.dump_config()) for name, task in self.task.loaded.tasks.items()}
        parts = [cell_part(cell) for cell in cells]
        found: list[Planned] = []
        for example in examples:
            document, shown, prompt, requests, name = self._asked(example, configs, seed)
            for cell, part in zip(cells, parts, strict=True):
                found.append(LmEvalWork(shown, prompt, cell, seed, name[:16], (name, part), document, requests))
        return found

    def recorder(self, works: Sequence[Planned]) -> Recorder:
        """What writes these records."""
        return Recorder(self.task, self.store, self.setup, works, self._named)

    def run(self, works: Sequence[Planned]) -> list[str]:
        """Make what is missing, a line for each failure; then lm-eval's own results of every cell."""
        with self.recorder(works) as recorder:

            def done(replies: list[Replied]) -> None:
                recorder.write([self._finish(recorder, reply) for reply in replies])

            for free in recorder.rounds():
                while bundle := list(islice(free, BUNDLE)):
                    recorder.write([self._unread(recorder, one) for one in bundle if not _of(one).requests])
                    asked = [one for one in map(_of, bundle) if one.requests]
                    stacks = [Asked(requests=w.requests, stack=w.cell.stack, tag=w) for w in asked]
                    self.service.serve(stacks, done)
            self._results(list(map(_of, works)))
            return recorder.failures

    def _asked(
        self, example: Example, configs: dict[str, str], seed: int
    ) -> tuple[Document, Example, Prompt, tuple[LmEvalRequest, ...], str]:
        """A document, what its records show of it, its requests, and the digest of all that they depend on but the cell."""
        document = self.task.loaded.documents[example.id]
        for one in document.instances:
            if one.request_type == "generate_until":
                generation_limits(one.args[1])
        requests, refused = self._encoded(document)
        main = max(requests, key=lambda r: len(r.all_ids), default=LmEvalRequest(kind=""))
        ids = main.ids or main.all_ids
        parts = {
            "document": [[one.request_type, *one.args] for one in document.instances],
            "id": example.id,
            "config": configs[document.task],
            "prompt": prompt_hash(requests),
            "refused": refused,
            "metric": self.task.metric,
            "seed": seed,
            **self.setup.identity,
        }
        shown = replace(example, truncated=any(r.truncated for r in requests))
        prompt = Prompt(context=ids[:-1], question=(), answer_prefix=ids[-1:], control_text=self._control_text(document))
        return document, shown, prompt, requests, digest(parts)

    def _control_text(self, document: Document) -> int:
        """Control words in a document's text, which lm-eval reads as control tokens; with a chat template, in its question."""
        asked = (
            self.task.loaded.tasks[document.task].doc_to_text(document.doc) if self.task.chat else document.instances[0].args[0]
        )
        return self.lm.tokens.user.count(asked) if isinstance(asked, str) else 0

    def _encoded(self, document: Document) -> tuple[tuple[LmEvalRequest, ...], str]:
        """Requests of a document, or none and the reason."""
        try:
            return tuple(self.encode(one) for one in document.instances), ""
        except UserError as error:
            return (), str(error)

    def _unread(self, recorder: Recorder, work: Planned) -> Record:
        return recorder.refused(work, self._encoded(_of(work).document)[1])

    def _named(self, work: Planned) -> dict[str, Any]:
        """What differs from task to task of a group."""
        own = _of(work)
        generates = any(request.kind == "generate_until" for request in own.requests)
        return {
            **{"task": own.document.task, "metric": self.task.metric, "prompt_sha256": prompt_hash(own.requests)},
            "decoding": self.lm.decoding if generates else "",
        }

    def _finish(self, recorder: Recorder, reply: Replied) -> Record:
        work: LmEvalWork = reply.asked.tag
        if reply.status == "failed":
            return recorder.failed(work, reply.error or "", reply.trace)
        if reply.status != "ok":
            return recorder.refused(work, reply.error or "")
        try:
            return recorder.record(work, **(recorder.measured(reply.main) | self._scored(work, reply)))
        except Exception as error:  # a metric of lm-eval that cannot take this answer: the others go on
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return recorder.failed(work, line, traceback.format_exc())

    def _scored(self, work: LmEvalWork, reply: Replied) -> dict[str, Any]:
        task, document = self.task.loaded.tasks[work.document.task], work.document
        responses = [one for one in reply.responses if one is not None]
        judged = judge(task, document, responses, self.task.metric)
        answers = [one.answer for one in reply.served if one.answer]
        nothing = reply.nothing
        scored = reply.scored + sum(len(r.target) for r in work.requests)
        metrics = dict(judged.metrics)
        share = reply.exercised / reply.scored if reply.scored else None  # of the tokens of whole texts
        if share is not None:
            metrics["exercised"] = share
        return {
            "metric": judged.metric,
            "score": judged.score,
            "weight": judged.weight,
            "aggregate": judged.aggregate,
            "higher_is_better": judged.higher_is_better,
            "chance": chance(document, judged, self.vocabulary, scored),
            "metrics": metrics,
            "compressed_share": share if work.cell.stack.compresses else None,
            "length": judged.length or work.example.length,
            "output": to_output(document, responses),
            "stop_reason": answers[0].stop_reason if answers else None,
            "entries_touched": reply.touched,
            "status": "not_exercised" if nothing else "ok",
            "error": (NOT_READ if reply.scored and not reply.exercised else NOTHING) if nothing else None,
        }

    def _results(self, works: Sequence[LmEvalWork]) -> None:
        """lm-eval's results of every cell, over its documents that have an answer, in a file of the run folder."""
        done = {r["key"]: r for r in self.store.records() if r["status"] in ("ok", "not_exercised")}
        if self.task.unsafe_code:  # what is run is what was generated here, not what stands in a folder
            done = {key: r for key, r in done.items() if r["writer"] == self.store.writer}
        by_cell: dict[str, dict[str, Any]] = {}
        for work in works:
            if work.key in done:
                try:
                    answers = from_output(work.document, done[work.key]["output"])
                except (ValueError, TypeError):
                    say_once(f"{self.store.folder}: the output of {work.example.id} is no answer of lm-eval's; passed over")
                    continue
                by_cell.setdefault(work.cell.name, {})[work.example.id] = answers
        for name, responses in by_cell.items():
            with _one_process():
                found = aggregate(self.task.loaded, responses, self.task.bootstrap_iters, self.task.unsafe_code)
            text = json.dumps(found, indent=1, default=str)
            self.store.write(
                Path(f"lm_eval-{_file_name(name)}.json"),
                lambda draft, text=text: draft.write_text(text, encoding="utf-8"),  # type: ignore[misc]
            )


def _of(work: Planned) -> LmEvalWork:
    assert isinstance(work, LmEvalWork)
    return work


def _file_name(cell: str) -> str:
    return re.sub(r"[^\w.=+-]", "-", cell)


@contextmanager
def _one_process() -> Any:
    """lm-eval bootstraps in a pool of processes, which costs more than it saves here, and prints that it does."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
