"""Questions on country reports: one numeric field of one record, among records of other countries.

Prompts depend on (seed, index, length) only, so that any process, order or limit makes the same ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import ClassVar

from harness.errors import UserError, require
from harness.fields import read_as
from harness.types import Corpus, Example, Score, Tokens
from tasks import scoring
from tasks.checks import above_0, all_different, as_tuple, require_bools, require_text, stop_strings, whole
from tasks.docqa_records import Library, Line, Report, Reports, rivals
from tasks.docqa_shelf import LEAST_LINES, Record, Shelf
from tasks.pieces import set_apart

BASELINES = ("none", "no_context")
_DRAWS = 100
_GUESSED = 64  # records that chance is worked out on
_TEXTS = {"heading": ("{country}",), "question": ("{country}", "{key}"), "answer_prefix": ()}


@dataclass(frozen=True, kw_only=True)
class DocQA:
    """A numeric field of one country's record, asked by its key; records of other countries fill the length.

    In the texts, {country} and {key} are filled in. The reports are read when the task is made, so that a missing source
    stops a run before a model is loaded.

    Args:
        reports: Source of the records.
        lengths: Most tokens of prompt and answer. Prompts are whole lines, up to three fewer; records may lose last lines.
        per_length: Questions for each length; an index asks about the same country at every length.
        fields: Least and most consecutive fields of one record.
        digits: Least digits of a number that is asked for.
        swap: Whether each field has the value of another country, so that answers cannot come from the model's weights.
        baseline: none, or no_context: the same questions with only the heading of the record as context.
        query_aware: Whether the question is part of what is compressed.
        chat: Whether the chat template goes around the prompt.
        max_new_tokens: Tokens of an answer at most.
        heading: First line of a record.
        question: Asked after the records.
        answer_prefix: The start of the answer, fed before decoding.
        metric: The headline score: contains, strict, exact or f1; the others are recorded too.
        stop: Strings that end the answer.
    """

    needs_corpus: ClassVar[bool] = False

    reports: Reports
    lengths: Sequence[int] = read_as(as_tuple, (2048,))
    per_length: int = 120
    fields: Sequence[int] = read_as(as_tuple, (60, 70))
    digits: int = 3
    swap: bool = False
    baseline: str = "none"
    query_aware: bool = False
    chat: bool = False
    max_new_tokens: int = 32
    heading: str = "Report on {country}"
    question: str = "What does the report on {country} give for {key}?"
    answer_prefix: str = "{key}:"
    metric: str = "contains"
    stop: Sequence[str] | str = read_as(stop_strings, ("\n",))

    def __post_init__(self) -> None:
        require(all_different(self.lengths, above_0), "task.lengths", self.lengths, "a list of different whole numbers above 0")
        span = isinstance(self.fields, tuple) and len(self.fields) == 2 and all(whole(n, LEAST_LINES) for n in self.fields)
        fits = span and self.fields[0] <= self.fields[1]
        require(fits, "task.fields", self.fields, f"[least, most], whole numbers from {LEAST_LINES}")
        for key, least in (("per_length", 1), ("digits", 1), ("max_new_tokens", 1)):
            value = getattr(self, key)
            require(whole(value, least), f"task.{key}", value, f"a whole number from {least}")
        require(self.baseline in BASELINES, "task.baseline", self.baseline, f"one of {', '.join(BASELINES)}")
        require(self.metric in scoring.METRICS, "task.metric", self.metric, f"one of {', '.join(scoring.METRICS)}")
        require_bools(self, "swap", "query_aware", "chat")
        for key, marks in _TEXTS.items():
            require_text(self, key, *marks)
        _ = self.stop, self.countries  # what is read here is checked

    @property
    def name(self) -> str:
        return "docqa" if self.baseline == "none" else f"docqa_{self.baseline}"

    @cached_property
    def library(self) -> Library:
        return Library.of(self.reports.reports())

    @cached_property
    def countries(self) -> tuple[Report, ...]:
        """Reports with enough fields to ask about; UserError if there are none."""
        found = tuple(report for report in self.library.reports if len(report.lines) >= self.fields[0])
        require(len(found) > 1, "task.fields", list(self.fields), f"fewer than two reports have {self.fields[0]} fields")
        return found

    @cached_property
    def chance(self) -> float:
        """Mean score of answering with another number of the same record, over 64 records.

        The answer is the whole value, with its unit, of each other field that starts with a number. 0 for contains, strict
        and exact, as the number asked for occurs once in its record; above 0 for f1, which scores units.
        """
        scores: list[float] = []
        for index in range(_GUESSED):
            rng, report = _rng("chance", index), self.countries[index % len(self.countries)]
            lines = self.window(report, rng)
            if asked := self.asked(report, lines, rng):
                wrong = [line.value for line in lines if line.number and line is not asked]
                scores += [self._judge(value, asked.answers, rivals(lines, asked)).value for value in wrong]
        return fmean(scores) if scores else 0.0

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """All examples, one of each length before the second of any; the corpus is not used.

        Raises:
            UserError: a length above the model's, or below what template, question and a record need.
        """
        most, lengths = tokens.max_length, list(self.lengths)
        fits = most is None or max(lengths) <= most
        require(fits, "task.lengths", lengths, f"the largest usable length of this model is {most}, answer included")
        order = _rng(seed, "order").sample(self.countries, len(self.countries))
        return [
            _Page(task=self, tokens=tokens, length=length).example(order[index % len(order)], seed, index)
            for index in range(self.per_length)
            for length in self.lengths
        ]

    def score(self, example: Example, answer: str) -> Score:
        """Contains the number (headline), and strict, exact and f1 beside it; any form of the value is accepted."""
        return self._judge(answer, example.answers, example.distractors)

    def _judge(self, answer: str, references: Sequence[str], others: Sequence[str]) -> Score:
        return scoring.judge(answer, references, metric=self.metric, rivals=others)

    def window(self, report: Report, rng: random.Random) -> tuple[Line, ...]:
        """Consecutive fields of a report, with values of other countries under `swap`."""
        lines = self.library.window(report, rng.randint(*self.fields), rng)
        return self.library.swapped(report.country, lines, rng) if self.swap else lines

    def asked(self, report: Report, lines: Sequence[Line], rng: random.Random) -> Line | None:
        """A line whose number is long enough and occurs once in the record and not in the question."""
        record = "\n".join((self.fill("heading", report), *(line.text for line in lines)))
        for line in rng.sample(lines, len(lines)):
            if line.number and sum(map(str.isdigit, line.number)) >= self.digits:
                question = "\n".join(self.fill(key, report, line) for key in ("question", "answer_prefix"))
                if scoring.occurrences(record, line.number) == 1 and not scoring.occurrences(question, line.number):
                    return line
        return None

    def fill(self, key: str, report: Report, line: Line | None = None) -> str:
        """A text of the task with {country} and {key} filled in."""
        text: str = getattr(self, key)
        return text.replace("{country}", report.country).replace("{key}", line.key if line else "")


@dataclass(frozen=True, kw_only=True)
class _Page:
    """Prompts of one length."""

    task: DocQA
    tokens: Tokens
    length: int

    def example(self, report: Report, seed: int, index: int) -> Example:
        """The example with this index; drawn again if the fields have no number to ask for."""
        rng = _rng(seed, index)
        for _ in range(_DRAWS):
            lines = self._fitting(report, self.task.window(report, rng))
            asked = self.task.asked(report, lines, rng)
            example = self._example(report, lines, asked, index, rng) if asked else None
            if example:
                return example
        raise UserError(
            f"the report on {report.country} has no number of task.digits={self.task.digits} digits that occurs once "
            f"among its fields, in {_DRAWS} draws: ask for fewer digits or fields"
        )

    def _fitting(self, report: Report, lines: Sequence[Line]) -> Sequence[Line]:
        """The first lines that fit whichever of them is asked for."""
        asked = max(lines, key=lambda line: self._count(line.key))
        room = self._missing("", *self._pieces(report, asked))
        record = Record(self.task.fill("heading", report), tuple(line.text for line in lines))
        cut = record.cut(room, self._count)
        needs = f"template, question and answer room need {self.length - room} tokens, and {LEAST_LINES} fields must fit too"
        require(cut is not None, "task.lengths", list(self.task.lengths), needs)
        return lines[: len(cut.lines)] if cut else ()

    def _example(self, report: Report, lines: Sequence[Line], asked: Line, index: int, rng: random.Random) -> Example | None:
        """The example, or None if the record alone is too long."""
        question, answer_prefix = self._pieces(report, asked)
        target = Record(self.task.fill("heading", report), tuple(line.text for line in lines))
        share = rng.random()
        room = self._missing(target.text, question, answer_prefix)
        others = self._others(report, asked, rng)
        shelf = Shelf.fill(target, others, room, share, self._count)
        while self._missing(shelf.text, question, answer_prefix) < 0 and (shorter := shelf.shorter()):
            shelf = shorter
        if self._missing(shelf.text, question, answer_prefix) < 0:
            return None
        alone = self.task.baseline == "no_context"
        depth = None if alone else self._count(shelf.up_to(lines.index(asked))) / self._count(shelf.text)
        return Example(
            id=f"{self.length}-{index}",
            context=target.heading if alone else shelf.text,
            question=question,
            answer_prefix=answer_prefix,
            answers=asked.answers,
            group_id=report.country,
            length=self.length,
            depth=None if depth is None else round(depth, 1),
            depth_realised=None if depth is None else round(depth, 4),
            max_new_tokens=self.task.max_new_tokens,
            stop=tuple(self.task.stop),
            distractors=rivals(lines, asked),
        )

    def _others(self, report: Report, asked: Line, rng: random.Random) -> Iterator[Record]:
        """Records of other countries in random order; none has the number asked for under the same key."""
        for other in rng.sample(self.task.countries, len(self.task.countries)):
            lines = self.task.window(other, rng)
            same = any(line.key == asked.key and line.number == asked.number for line in lines)
            if other is not report and not same:
                yield Record(self.task.fill("heading", other), tuple(line.text for line in lines))
        raise UserError(f"task.lengths={list(self.task.lengths)} is not possible: all reports together are shorter")

    def _pieces(self, report: Report, asked: Line) -> tuple[str, str]:
        texts = (self.task.fill(key, report, asked) for key in ("question", "answer_prefix"))
        return set_apart(*texts, chat=self.task.chat)

    def _missing(self, context: str, question: str, answer_prefix: str) -> int:
        """Tokens between prompt + answer room and the length asked."""
        prompt = self.tokens.prompt(context, question, answer_prefix, chat=self.task.chat)
        return self.length - self.task.max_new_tokens - len(prompt.ids)

    def _count(self, text: str) -> int:
        return len(self.tokens.encode(text))


def _rng(*parts: object) -> random.Random:
    return random.Random(hashlib.sha256("|".join(map(str, parts)).encode()).digest())
