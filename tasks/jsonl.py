"""Your own questions from a file of JSON lines.

A line is an object with `context`, `question` and `answers` (a text or a list of texts), and optionally
`answer_prefix`, `id`, `group` (the document, for the intervals) and `distractors` (values that are not the answer).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError, require
from harness.fields import read_as
from harness.files.plain_files import read_text
from harness.types import Corpus, Example, Score, Tokens
from tasks import echo, scoring
from tasks.checks import listed, require_bools, require_valid, share, stop_strings, whole
from tasks.fit import SIDES, fitted
from tasks.pieces import set_apart

_NEEDED = ("context", "question", "answers")
_OPTIONAL = ("answer_prefix", "id", "group", "distractors")


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Questions and answers from one file; all lines are read when the task is made, so that a bad one stops a run early.

    Args:
        path: The file; `~` is the home folder.
        query_aware: Whether the question is part of what is compressed.
        chat: Whether the chat template goes around the prompt.
        max_new_tokens: Tokens of an answer at most.
        stop: Strings that end the answer.
        metric: The headline score: contains, strict, exact or f1; the others are recorded too.
        chance: Headline score of a guess.
        truncate: What happens to a prompt that, with its answer, is longer than the model's positions: refuse, or cut
            the context at its left or in its middle and mark the example truncated.
    """

    path: str | None = None
    query_aware: bool = False
    chat: bool = False
    max_new_tokens: int = 32
    stop: Sequence[str] | str = read_as(stop_strings, ())
    metric: str = "contains"
    chance: float = 0.0
    truncate: str = "refuse"

    def __post_init__(self) -> None:
        require(isinstance(self.path, str) and bool(self.path), "task.path", self.path, "name a file, task.path=FILE")
        require(whole(self.max_new_tokens, 1), "task.max_new_tokens", self.max_new_tokens, "a whole number above 0")
        require(self.metric in scoring.METRICS, "task.metric", self.metric, f"one of {', '.join(scoring.METRICS)}")
        require(share(self.chance) and self.chance < 1, "task.chance", self.chance, "a number from 0 to below 1")
        require(self.truncate in SIDES, "task.truncate", self.truncate, f"one of {', '.join(SIDES)}")
        require_bools(self, "query_aware", "chat")
        _ = self.stop  # what is read here is checked
        self.read()

    @property
    def name(self) -> str:
        return "jsonl"

    def read(self) -> list[Example]:
        """The examples of the file, whatever their length.

        Raises:
            UserError: no such file, an empty one, or a line that is not a question; names file and line.
        """
        path = Path(str(self.path)).expanduser()
        try:
            text = read_text(path, "utf-8-sig", follow=True)
        except OSError as error:
            raise UserError(f"task.path={self.path!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"task.path={self.path!r} is not UTF-8 text: byte {error.start}") from None
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        found: dict[str, Example] = {}
        for number, line in lines:
            where = f"{path.name}, line {number}"
            example = self._example(line, number, where)
            if example.id in found:
                raise UserError(f"{where}: id {example.id!r} is also on an earlier line")
            found[example.id] = example
        if not found:
            raise UserError(f"task.path={self.path!r} holds no line")
        return list(found.values())

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """All lines in order; corpus and seed are not used.

        Raises:
            UserError: a prompt is too long for the model, and truncate is refuse or cutting the context is not enough.
        """
        name = Path(str(self.path)).name
        return [fitted(e, tokens, chat=self.chat, truncate=self.truncate, source=name) for e in self.read()]

    def notices(self, examples: Sequence[Example]) -> list[str]:
        """Warnings about these examples, before a run begins."""
        return echo.notices(examples)

    def score(self, example: Example, answer: str) -> Score:
        """The headline picked by `metric` and all scores, best over the references; an echo of the question does not count."""
        answer = echo.without_echo(answer, example)
        return scoring.judge(answer, example.answers, metric=self.metric, rivals=example.distractors)

    def _example(self, line: str, number: int, where: str) -> Example:
        row = _row(line, where)
        context, question = _text(row, "context", where), _text(row, "question", where)
        if not context.strip():
            raise UserError(f"{where}: context is empty")
        answers = _texts(row, "answers", where)
        if not any(map(scoring.normalise, answers)):
            raise UserError(f"{where}: answers={row['answers']!r} holds no word to compare with")
        question, answer_prefix = set_apart(question, _text(row, "answer_prefix", where), chat=self.chat)
        if not (question or answer_prefix):
            raise UserError(f"{where}: question and answer_prefix are both empty")
        example = Example(
            id=_label(row, "id", where) or str(number),
            context=context,
            question=question,
            answer_prefix=answer_prefix,
            answers=answers,
            group_id=_label(row, "group", where) or hashlib.sha256(context.encode()).hexdigest()[:12],
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            distractors=_texts(row, "distractors", where),
        )
        if echo.is_answer(example):
            raise UserError(f"{where}: the question or the answer_prefix is an answer itself, so an echo would count as right")
        return example


def _row(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON, {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{where}: not JSON, nested too deep") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__} where an object with {', '.join(_NEEDED)} is wanted")
    for key in _NEEDED:
        if key not in row:
            raise UserError(f"{where}: {key} is missing (needed: {', '.join(_NEEDED)})")
    unknown = sorted(set(row) - {*_NEEDED, *_OPTIONAL})
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r} (known: {', '.join((*_NEEDED, *_OPTIONAL))})")
    for key, value in row.items():
        require_valid(value, f"{where}: {key}")
    return row


def _text(row: dict[str, object], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}={value!r} is not a text")
    return value.removeprefix("\ufeff")


def _texts(row: dict[str, object], key: str, where: str) -> tuple[str, ...]:
    value = row.get(key, [])
    items = (value,) if isinstance(value, str) else listed(value)
    texts = tuple(item for item in items if isinstance(item, str))
    if not isinstance(value, str | list) or len(texts) != len(items):
        raise UserError(f"{where}: {key}={value!r} is not a text or a list of texts")
    return texts


def _label(row: dict[str, object], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise UserError(f"{where}: {key}={value!r} is not a text or a whole number")
    return str(value)
