"""lm-eval tasks: every document under every arm, and lm-eval's own results beside the records.

lm-eval's results are made from the records of all writers.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import groupby
from pathlib import Path

from harness.configure.arms import Arm
from harness.engine.requests import Request, Result
from harness.errors import UserError, require
from harness.evaluation.planned import Planned, Setup, arm_digest
from harness.evaluation.record_fields import Fields
from harness.evaluation.record_maker import NOTHING, RecordMaker
from harness.files.digests import digest
from harness.files.json_values import Config
from harness.files.paths import MOST
from harness.files.plain_files import say_once
from harness.lm_eval.documents import Response, firsts, nothing, read, requests_of, responses
from harness.lm_eval.encoding import Encoder, LmEvalRequest, generation_limits, prompt_hash
from harness.lm_eval.metrics import aggregate, chance, from_output, judge, to_output
from harness.models.load import LM
from harness.records.store import Store
from harness.types import Example, Prompt, Record
from tasks.lm_eval_task import FIRST, Document, LmEval

PLACES = ("tokenizer", "config_source")  # metadata of a task that say where files lie; what is in them is in the key by itself
NOT_READ = "compression cannot act: a text this short, or without a context, is read exactly"


@dataclass(frozen=True, kw_only=True)
class LmEvalPlanned(Planned):
    """A document under an arm, with its requests."""

    document: Document
    requests: tuple[LmEvalRequest, ...]

    @property
    def answer_room(self) -> int:
        return max((request.max_new for request in self.requests), default=0)


class LmEvalRunner:
    """Makes the records of lm-eval tasks."""

    def __init__(self, lm: LM, task: LmEval, setup: Setup, store: Store[Planned]) -> None:
        self.lm, self.task, self.setup, self.store = lm, task, setup, store
        self.maker = RecordMaker(task, setup)
        limit = lm.tokens.max_length
        require(limit is not None, "model", setup.model, "lm-eval needs to know how many positions it has")
        self.encode = Encoder(lm.tokens, int(limit or 0), task.truncate)
        self.vocabulary = int(lm.model.config.get_text_config().vocab_size)

    def pending(self, examples: Sequence[Example], arms: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all documents under all arms are."""
        for name, task in self.task.loaded.tasks.items():
            has = self.task.metric in (FIRST, *task.aggregation())
            require(has, "task.metric", self.task.metric, f"{name} gives {', '.join(task.aggregation())}")
        configs = {name: digest(_without_places(task.dump_config())) for name, task in self.task.loaded.tasks.items()}
        digests = [arm_digest(arm) for arm in arms]
        return [one for example in examples for one in self._document(example, configs, seed, arms, digests)]

    def _document(
        self, example: Example, configs: dict[str, str], seed: int, arms: Sequence[Arm], digests: Sequence[str]
    ) -> list[Planned]:
        """The records of a document; the digest in their keys is of all that they depend on but the arm."""
        document = self.task.loaded.documents[example.id]
        for one in document.instances:
            if one.request_type == "generate_until":
                generation_limits(one.args[1])
        requests, refusal = self._encoded(document)
        main = max(requests, key=lambda r: len(r.all_ids), default=LmEvalRequest(kind=""))
        ids = main.ids or main.all_ids
        about = {
            "document": [[one.request_type, *one.args] for one in document.instances],
            "id": example.id,
            "config": configs[document.task],
            "prompt": prompt_hash(requests),
            "refused": refusal,
            "metric": self.task.metric,
            "seed": seed,
            **self.setup.identity,
        }
        name = digest(about)
        shown = replace(example, truncated=any(r.truncated for r in requests))
        prompt = Prompt(context=ids[:-1], question=(), answer_prefix=ids[-1:], control_text=self._control_text(document))
        return [
            LmEvalPlanned(
                example=shown,
                prompt=prompt,
                arm=arm,
                seed=seed,
                claim=name[:16],
                digests=(name, of_arm),
                shared=self._shared(document, requests),
                refusal=refusal or None,
                document=document,
                requests=requests,
            )
            for arm, of_arm in zip(arms, digests, strict=True)
        ]

    def _shared(self, document: Document, requests: Sequence[LmEvalRequest]) -> Fields:
        """What differs from task to task of a group."""
        generates = any(request.kind == "generate_until" for request in requests)
        return {
            "task": document.task,
            "metric": self.task.metric,
            "prompt_sha256": prompt_hash(requests),
            "decoding": self.lm.decoding if generates else "",
        }

    def requests(self, planned: Iterable[Planned]) -> Iterator[Request[Planned]]:
        """Several requests a record; those of one document and context are neighbours."""
        documents = groupby(map(_of, planned), key=lambda one: (one.seed, one.example.id))
        grouped = (list(same) for _, same in documents)
        return requests_of((([(one, one.arm.stack) for one in same], same[0].requests) for same in grouped), self.lm.tokens)

    def record(self, planned: Planned, results: Sequence[Result[Planned]]) -> Record:
        """The record of a document's responses, judged by lm-eval."""
        own = _of(planned)
        longest = max(firsts(own.requests, results), key=lambda one: one.start.seen)  # what bytes are reported of
        return self.maker.record(own, **self.maker.measured(longest) | self._scored(own, results))

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

    def _scored(self, planned: LmEvalPlanned, results: Sequence[Result[Planned]]) -> Fields:
        task, document = self.task.loaded.tasks[planned.document.task], planned.document
        answered = responses(planned.requests, results, self.lm.tokens)
        judged = judge(task, document, answered, self.task.metric)
        answers = [one.answer for one in results if one.answer]
        texts, empty = read(results), nothing(planned.requests, results)
        scored = texts.scored + sum(len(r.target) for r in planned.requests)
        metrics = dict(judged.metrics)
        share = texts.exercised / texts.scored if texts.scored else None  # of the tokens of whole texts
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
            "compressed_share": share if planned.arm.stack.compresses else None,
            "length": judged.length or planned.example.length,
            "output": to_output(document, answered),
            "stop_reason": answers[0].stop_reason if answers else None,
            "entries_touched": sum(one.entries for one in firsts(planned.requests, results)),
            "status": "not_exercised" if empty else "ok",
            "error": (NOT_READ if share == 0 else NOTHING) if empty else None,
        }

    def finish(self, planned: Sequence[Planned]) -> None:
        """lm-eval's results of every arm, over its documents that have an answer, in a file of the run folder."""
        done = {r["key"]: r for r in self.store.records() if r["status"] in ("ok", "not_exercised")}
        if self.task.unsafe_code:  # what is run is what was generated here, not what is found in a folder
            done = {key: r for key, r in done.items() if r["writer"] == self.store.writer}
        by_arm: dict[str, dict[str, list[Response]]] = {}
        for one in map(_of, planned):
            if one.key in done:
                try:
                    answers = from_output(one.document, done[one.key]["output"])
                except (ValueError, TypeError):
                    say_once(f"{self.store.folder}: the output of {one.example.id} is no answer of lm-eval's; passed over")
                    continue
                by_arm.setdefault(one.arm.name, {})[one.example.id] = answers
        files = file_names(by_arm)
        for name, answered in by_arm.items():
            with _one_process():
                found = aggregate(self.task.loaded, answered, self.task.bootstrap_iters, self.task.unsafe_code)
            text = json.dumps(found, indent=1, default=str)
            self.store.write(
                Path(f"lm_eval-{files[name]}.json"),
                lambda draft, text=text: draft.write_text(text, encoding="utf-8"),  # type: ignore[misc]
            )


def _of(planned: Planned) -> LmEvalPlanned:
    assert isinstance(planned, LmEvalPlanned)
    return planned


def file_names(arms: Iterable[str]) -> dict[str, str]:
    """Each arm's name as part of a file's, none too long, no two alike whatever their case."""
    short = {arm: re.sub(r"[^\w.,=+-]", "-", arm).encode()[:MOST].decode(errors="ignore") for arm in arms}
    alike = Counter(name.casefold() for name in short.values())
    cut = {arm: len(name) < len(arm) or alike[name.casefold()] > 1 for arm, name in short.items()}
    return {arm: f"{name}-{digest(arm)[:8]}" if cut[arm] else name for arm, name in short.items()}


@contextmanager
def _one_process() -> Iterator[None]:
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


def _without_places(config: Config) -> Config:
    """A task's configuration as it decides records: the same ones wherever the user's cache and lm-eval are installed."""
    metadata = {name: value for name, value in (config.get("metadata") or {}).items() if name not in PLACES}
    return {**config, "metadata": metadata}
