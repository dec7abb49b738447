"""Questions on documents from a hub data set, or from a file in the SQuAD format."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from harness.errors import UserError, require
from harness.fields import read_as
from harness.types import Corpus, Example, Score, Tokens
from tasks import echo, scoring
from tasks.checks import require_bools, require_text, share, stop_strings, whole
from tasks.fit import SIDES, fitted
from tasks.hub_rows import picked, squad_rows, texts
from tasks.pieces import set_apart

_COLUMNS = {"context": True, "question": True, "answers": True, "titles": False, "id": False, "group": False}


@dataclass(frozen=True, kw_only=True)
class HubQA:
    """Questions of one data set, read when the task is made, so that a missing network stops a run early.

    Rows without an answer (SQuAD 2) are left out. An answer is not strict if it contains an answer to another
    question on the same context; if there are none, an answer in words is strict if it contains a reference.

    Args:
        name: Label in records.
        repo: `ORG/NAME` on the hub; used if `path` is null.
        revision: Commit of the data set.
        subset: Configuration of the set, null if it has only one.
        split: For example `test` or `validation[:100]`.
        path: A local file in the SQuAD format instead of the hub; its rows have the columns of `rajpurkar/squad`.
        columns: Names of the columns of context, question and answers, and optionally titles (of a context that is a list
            of documents), id and group (the document, for the intervals). A dot leads into a column: `answers.text`.
        intro: A paragraph before the context.
        question: How the question is asked; {question} is filled in.
        answer_prefix: The start of the answer, fed before decoding.
        query_aware: Whether the question is part of what is compressed.
        chat: Whether the chat template goes around the prompt.
        max_new_tokens: Tokens of an answer at most.
        stop: Strings that end the answer.
        metric: The headline score: contains, strict, exact or f1; the others are recorded too. All are 0..1.
        chance: Headline score of a guess.
        truncate: What happens to a prompt that, with its answer, is longer than the model's positions: refuse, or cut
            the context at its left or in its middle and mark the example truncated.
    """

    needs_corpus: ClassVar[bool] = False

    name: str
    repo: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "test"
    path: str | None = None
    columns: Mapping[str, str | None] = field(hash=False)
    intro: str = ""
    question: str = "Question: {question}"
    answer_prefix: str = "Answer:"
    query_aware: bool = False
    chat: bool = False
    max_new_tokens: int = 32
    stop: Sequence[str] | str = read_as(stop_strings, ())
    metric: str = "f1"
    chance: float = 0.0
    truncate: str = "refuse"

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and bool(self.name), "task.name", self.name, "a label")
        self._check_source()
        self._check_columns()
        require_text(self, "question", "{question}")
        for key in ("intro", "answer_prefix"):
            require_text(self, key)
        require(whole(self.max_new_tokens, 1), "task.max_new_tokens", self.max_new_tokens, "a whole number above 0")
        require(self.metric in scoring.METRICS, "task.metric", self.metric, f"one of {', '.join(scoring.METRICS)}")
        require(share(self.chance) and self.chance < 1, "task.chance", self.chance, "a number from 0 to below 1")
        require(self.truncate in SIDES, "task.truncate", self.truncate, f"one of {', '.join(SIDES)}")
        require_bools(self, "query_aware", "chat")
        _ = self.stop, self.questions  # what is read here is checked

    def _check_source(self) -> None:
        for key in ("path", "subset"):
            value = getattr(self, key)
            require(value is None or (isinstance(value, str) and bool(value)), f"task.{key}", value, "a text, or null")
        for key, allowed in (("repo", "ORG/NAME"), ("revision", "the commit of the data set"), ("split", "a split")):
            value = getattr(self, key)
            fits = self.path is not None or (isinstance(value, str) and bool(value))
            require(fits, f"task.{key}", value, f"{allowed} (or name a file, task.path=FILE)")

    def _check_columns(self) -> None:
        columns = dict(self.columns) if isinstance(self.columns, Mapping) else {}
        fits = set(columns) <= set(_COLUMNS) and all(
            isinstance(columns.get(key), str) or (not needed and columns.get(key) is None) for key, needed in _COLUMNS.items()
        )
        require(fits, "task.columns", self.columns, "a column for context, question, answers[, titles, id, group]")

    @property
    def label(self) -> str:
        """Where the rows come from, as errors name it."""
        if self.path is not None:
            return f"task.path={self.path!r}"
        subset = f", subset {self.subset!r}" if self.subset else ""
        return f"data set {self.repo!r} (revision {self.revision}{subset}, split {self.split!r})"

    @cached_property
    def questions(self) -> tuple[Example, ...]:
        """The examples of the source, whatever their length.

        Raises:
            UserError: the source is not available or has no questions; names data set and revision, or file.
        """
        found: dict[str, Example] = {}
        for number, row in enumerate(self._rows()):
            example = self._example(number, row)
            if not any(map(scoring.normalise, example.answers)):
                continue
            if echo.is_answer(example):
                raise UserError(
                    f"{self.label}, row {number}: the question or task.answer_prefix is an answer itself, so an echo would "
                    "count as right"
                )
            if example.id in found:
                raise UserError(f"{self.label}: id {example.id!r} occurs twice")
            found[example.id] = example
        if not found:
            raise UserError(f"{self.label} holds no question with an answer")
        return tuple(_with_rivals(found.values()))

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """All questions in order; corpus and seed are not used.

        Raises:
            UserError: a prompt is too long for the model, and truncate is refuse or cutting the context is not enough.
        """
        return [
            fitted(example, tokens, chat=self.chat, truncate=self.truncate, source=self.label) for example in self.questions
        ]

    def notices(self, examples: Sequence[Example]) -> list[str]:
        """Warnings about these examples, before a run begins."""
        return echo.notices(examples)

    def score(self, example: Example, answer: str) -> Score:
        """The headline picked by `metric` and all scores, best over the references; an echo of the question does not count."""
        answer = echo.without_echo(answer, example)
        return scoring.judge(answer, example.answers, metric=self.metric, rivals=example.distractors)

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        if self.path is not None:
            return squad_rows(self.path)
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line of ours instead of each retry of theirs
        try:
            rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
                self.repo, self.subset, split=self.split, revision=self.revision
            )
        except (OSError, ValueError, RuntimeError) as error:  # not reached, not found, or built by a script
            raise UserError(f"{self.label} cannot be fetched: {(str(error).splitlines() or [''])[0]}") from None
        return rows

    def _example(self, number: int, row: Mapping[str, Any]) -> Example:
        where = f"{self.label}, row {number}"
        context = self._context(row, where)
        asked = " ".join(texts(picked(row, self.columns["question"], where), where))
        question, answer_prefix = set_apart(
            self.question.replace("{question}", asked.strip()), self.answer_prefix, chat=self.chat
        )
        label, group = self.columns.get("id"), self.columns.get("group")
        return Example(
            id=str(picked(row, label, where)) if label else str(number),
            context=context,
            question=question,
            answer_prefix=answer_prefix,
            answers=tuple(dict.fromkeys(texts(picked(row, self.columns["answers"], where), where))),
            group_id=str(picked(row, group, where)) if group else hashlib.sha256(context.encode()).hexdigest()[:12],
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
        )

    def _context(self, row: Mapping[str, Any], where: str) -> str:
        """One text: documents separated by blank lines, each below its title if there are titles."""
        documents = texts(picked(row, self.columns["context"], where), where)
        column = self.columns.get("titles")
        titles = texts(picked(row, column, where), where) if column else [""] * len(documents)
        if len(titles) != len(documents):
            raise UserError(f"{where}: {len(titles)} titles for {len(documents)} documents")
        pairs = zip(titles, documents, strict=True)
        context = "\n\n".join(f"{title}\n{text}" if title else text for title, text in pairs)
        if not context.strip():
            raise UserError(f"{where}: the context is empty")
        return f"{self.intro}\n\n{context}" if self.intro else context


def _with_rivals(examples: Iterable[Example]) -> Iterable[Example]:
    """Each example with the answers to the other questions on its context, except those that overlap its own."""
    shared: dict[str, list[Example]] = {}
    listed = list(examples)
    for example in listed:
        shared.setdefault(example.context, []).append(example)
    for example in listed:
        others = [text for other in shared[example.context] if other is not example for text in other.answers]
        rivals = (text for text in dict.fromkeys(others) if not _overlaps(text, example.answers))
        yield replace(example, distractors=tuple(rivals))


def _overlaps(text: str, answers: Sequence[str]) -> bool:
    return any(scoring.occurrences(text, one) or scoring.occurrences(one, text) for one in answers)
