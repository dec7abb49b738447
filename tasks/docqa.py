"""Questions on country reports: one numeric field of one record, among records of other countries. It knows no model.

Prompts follow from (seed, index, length) alone, so any process, order or limit sees the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar, Protocol

from harness.types import Corpus, Example, Score, Tokens, require
from tasks import scoring
from tasks.checks import listed, require_bools, stop_strings, whole
from tasks.docqa_records import Library, Line, Report
from tasks.docqa_shelf import LEAST_LINES

BASELINES = ("none", "no_context")
_DRAWS = 100
_GUESSED = 64  # records that chance is worked out on
_TEXTS = {"heading": ("{country}",), "question": ("{country}", "{key}"), "answer_prefix": ()}


class Reports(Protocol):
    """Where the records come from; `tasks.corpus.Factbook` is one."""

    def reports(self) -> Mapping[str, Mapping[str, Any]]:
        """Nested dictionaries by label: category -> field -> {"text": value}, or a dictionary of such parts."""
        ...


@dataclass(frozen=True, kw_only=True)
class DocQA:
    """A numeric field of one country's record, asked by its key; records of other countries fill the length.

    In the texts, {country} and {key} are filled in. The reports are read when the task is made, so a source that cannot
    be had stops a run early.

    Args:
        reports: Source of the records.
        lengths: Tokens of prompt and answer room together, at most: whole lines only, so a prompt ends about a line
            below. A record that does not fit loses its last lines.
        per_length: Questions for each length; an index asks about the same country at every length.
        fields: Least and most consecutive fields of one record.
        digits: Digits that a number has at least, to be asked for.
        swap: Whether each field of every record takes the value of another country, so that no weights can know it.
        baseline: none, or no_context: the same questions after the heading of the record alone.
        query_aware: Whether the question may be seen while the cache is compressed.
        chat: Whether the chat template goes around the prompt.
        max_new_tokens: Tokens of an answer at most.
        heading: First line of a record.
        question: Asked after the records.
        answer_prefix: The start of the answer, fed before the model goes on.
        metric: The headline score: contains, strict, exact or f1; the others stand beside it.
        stop: Strings that end the answer.
    """

    needs_corpus: ClassVar[bool] = False

    reports: Reports
    lengths: Sequence[int] = (2048,)
    per_length: int = 120
    fields: Sequence[int] = (60, 70)
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
    stop: Sequence[str] | str = ("\n",)

    def __post_init__(self) -> None:
        lengths, fields = listed(self.lengths), listed(self.fields)
        fits = bool(lengths) and all(whole(n, 1) for n in lengths) and len(set(lengths)) == len(lengths)
        require(fits, "task.lengths", self.lengths, "a list of different whole numbers above 0")
        span = len(fields) == 2 and all(whole(n, LEAST_LINES) for n in fields) and fields[0] <= fields[1]  # type: ignore[operator]
        require(span, "task.fields", self.fields, f"[least, most], whole numbers from {LEAST_LINES}")
        for key, least in (("per_length", 1), ("digits", 1), ("max_new_tokens", 1)):
            value = getattr(self, key)
            require(whole(value, least), f"task.{key}", value, f"a whole number from {least}")
        require(self.baseline in BASELINES, "task.baseline", self.baseline, f"one of {', '.join(BASELINES)}")
        require(self.metric in scoring.METRICS, "task.metric", self.metric, f"one of {', '.join(scoring.METRICS)}")
        require_bools(self, "swap", "query_aware", "chat")
        for key, marks in _TEXTS.items():
            text = getattr(self, key)
            allowed = f"a text that holds {' and '.join(marks)}" if marks else "a text"
            require(isinstance(text, str) and all(mark in text for mark in marks), f"task.{key}", text, allowed)
        for key, values in (("lengths", lengths), ("fields", fields), ("stop", stop_strings(self.stop))):
            object.__setattr__(self, key, values)
        _ = self.countries

    @property
    def name(self) -> str:
        return "docqa" if self.baseline == "none" else f"docqa_{self.baseline}"

    @cached_property
    def library(self) -> Library:
        return Library.of(self.reports.reports())

    @cached_property
    def countries(self) -> tuple[Report, ...]:
        """Reports with enough fields to be asked about (UserError where there is none)."""
        least = self.fields[0]
        found = tuple(report for report in self.library.reports if len(report.lines) >= least)
        require(len(found) > 1, "task.fields", list(self.fields), f"fewer than two reports have {least} fields")
        return found

    @cached_property
    def chance(self) -> float:
        """Mean score of answering with the number-led value of another field of the same record, over 64 records.

        0 for contains, strict and exact, as the number asked for stands once in its record; above for f1, which gives
        credit for a unit in common. A known guess (the same field of another country) is what `baseline` and `swap`
        tell apart.
        """
        scores: list[float] = []
        for index in range(_GUESSED):
            rng = _rng("chance", index)
            found = self.drawn(self.countries[index % len(self.countries)], None, rng)
            if found:
                lines, asked = found
                others = [line.value for line in lines if line.number and line is not asked]
                scores += [
                    scoring.judge(value, asked.answers, metric=self.metric, rivals=_rivals(lines, asked)).value
                    for value in others
                ]
        return fmean(scores) if scores else 0.0

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """All examples, one of each length before the second of any; the corpus changes nothing.

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
        """Contains the number (headline), and strict, exact and f1 beside it; any form of the value counts."""
        return scoring.judge(answer, example.answers, metric=self.metric, rivals=example.distractors)

    def window(self, report: Report, rng: random.Random) -> tuple[Line, ...]:
        """Consecutive fields of a report, with values of other countries where `swap` says so."""
        lines = self.library.window(report, rng.randint(*self.fields), rng)
        return self.library.swapped(report.country, lines, rng) if self.swap else lines

    def drawn(self, report: Report, fits: Any, rng: random.Random) -> tuple[tuple[Line, ...], Line] | None:
        raise NotImplementedError

    def fill(self, key: str, report: Report, line: Line | None = None) -> str:
        """A text of the task with {country} and {key} filled in."""
        text: str = getattr(self, key)
        return text.replace("{country}", report.country).replace("{key}", line.key if line else "")
