"""The needle task: one sentence with a value, hidden in real prose at a known depth.

Prompts depend on (seed, length, depth, index) and the number of questions only, so that any process, order or limit makes the
same ones. Each has exactly the length asked for: chat template, question, answer prefix and the room for the answer included.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UserError, require
from harness.fields import read_as
from harness.types import Corpus, Example, Score, Tokens
from tasks import scoring
from tasks.checks import above_0, all_different, as_tuple, require_bools, require_text, share, stop_strings, whole
from tasks.haystack import OFF, Haystack, Prose
from tasks.hidden import KINDS, Hidden, draw, fill, found_once, placed
from tasks.pieces import set_apart
from tasks.words import KEYS, VALUES

AWARE_OF = ("own", "first")
_DRAWS = 100
_NATURAL = 20  # of these, until a needle may stand inside a sentence
_TEXTS = {"needle": ("{key}", "{value}"), "question": ("{key}",), "answer_prefix": (), "intro": ()}


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A needle in a haystack, after RULER's NIAH (Hsieh et al. 2024), with real prose and exact lengths.

    In the texts, {kind} and {key} are filled in, and {value} in the needle.

    Args:
        lengths: Tokens of prompt and answer together.
        depths: Share of the prose's tokens before the needle, which is placed between sentences, or words if none ends near.
        per_cell: Examples for each length and depth.
        kind: What the value is: number (7 digits), word, or uuid.
        distractor_needles: Other needles with other keys and values, anywhere in the prose.
        questions: Needles asked about in each context, one example each: the first at the depth asked for, the next ones
            each 1 / questions of the prose later, wrapping at its end. The longest prompt has exactly the length asked for.
        query_aware: Whether the question is part of what is compressed.
        aware_of: With query_aware, which question of a context is part of what is compressed: own, or first (for all).
        chat: Whether the chat template goes around the prompt.
        max_new_tokens: Room for the answer; None: enough for the kind.
        intro: A paragraph before the prose, without a key.
        needle: The hidden sentence.
        question: Asked after the prose.
        answer_prefix: The start of the answer, fed before decoding.
        metric: The headline score: contains, strict, exact or f1.
        stop: Strings that end the answer.
    """

    lengths: Sequence[int] = read_as(as_tuple, (1024,))
    depths: Sequence[float] = read_as(as_tuple, (0.0, 0.25, 0.5, 0.75, 1.0))
    per_cell: int = 1
    kind: str = "number"
    distractor_needles: int = 0
    questions: int = 1
    query_aware: bool = False
    aware_of: str = "own"
    chat: bool = False
    max_new_tokens: int | None = None
    intro: str = ""
    needle: str = "The special magic {kind} for {key} is: {value}."
    question: str = "What is the special magic {kind} for {key} mentioned in the text above?"
    answer_prefix: str = "The special magic {kind} for {key} is:"
    metric: str = "contains"
    stop: Sequence[str] | str = read_as(stop_strings, ())

    def __post_init__(self) -> None:
        require(all_different(self.lengths, above_0), "task.lengths", self.lengths, "a list of different whole numbers above 0")
        require(all_different(self.depths, share), "task.depths", self.depths, "a list of different numbers from 0 to 1")
        others, room, most = self.distractor_needles, self.max_new_tokens, f"a whole number from 0 to {len(KEYS) - 1}"
        require(whole(self.per_cell, 1), "task.per_cell", self.per_cell, "a whole number above 0")
        require(self.kind in KINDS, "task.kind", self.kind, f"one of {', '.join(KINDS)}")
        require(whole(others, 0) and others < len(KEYS), "task.distractor_needles", others, most)
        asked = f"a whole number from 1 to {len(KEYS) - others} (distractor_needles={others})"
        require(whole(self.questions, 1) and self.questions + others <= len(KEYS), "task.questions", self.questions, asked)
        require(room is None or whole(room, 1), "task.max_new_tokens", room, "a whole number above 0, or null")
        require(self.metric in scoring.METRICS, "task.metric", self.metric, f"one of {', '.join(scoring.METRICS)}")
        require_bools(self, "query_aware", "chat")
        require(self.aware_of in AWARE_OF, "task.aware_of", self.aware_of, f"one of {', '.join(AWARE_OF)}")
        fits = self.aware_of == "own" or (self.query_aware and not self.chat and self.questions > 1)
        require(fits, "task.aware_of", self.aware_of, "first needs query_aware=true, chat=false and questions above 1")
        _ = self.stop  # what is read here is checked
        for key, marks in _TEXTS.items():
            text = require_text(self, key, *marks)
            require(key == "needle" or "{value}" not in text, f"task.{key}", text, "only task.needle may hold {value}")
            require(key != "intro" or "{key}" not in text, f"task.{key}", text, "the context must not name the key asked for")

    @property
    def name(self) -> str:
        return "needle"

    @property
    def chance(self) -> float:
        """Score of answering without the context."""
        return 1 / len(VALUES) if self.kind == "word" else 0.0

    @property
    def answer_room(self) -> int:
        """Tokens of the answer at most."""
        return KINDS[self.kind] if self.max_new_tokens is None else self.max_new_tokens

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """All examples, one context of each cell before the second of any, so that a limit still covers the grid.

        Raises:
            UserError: a length above the model's, below what template and needle need, or beyond the corpus.
        """
        most, lengths = tokens.max_length, list(self.lengths)
        usable = f"the largest usable length of this model is {most}, answer included"
        require(most is None or max(lengths) <= most, "task.lengths", lengths, usable)
        if corpus is None:
            raise UserError("corpus=None is not possible: task=needle hides its needle in a corpus; name one")
        prose = Prose.of(corpus)
        if not prose.sentences:
            raise UserError(f"corpus {corpus.name} is empty: no haystack for task.lengths={lengths}")
        cells = [
            _Cell(task=self, tokens=tokens, corpus=corpus.name, prose=prose, length=length, depth=float(depth))
            for length in self.lengths
            for depth in self.depths
        ]
        return [example for index in range(self.per_cell) for cell in cells for example in cell.examples(seed, index)]

    def score(self, example: Example, answer: str) -> Score:
        """Contains the value at a word boundary (headline), and strict, exact and f1 beside it."""
        rivals = (*example.distractors, *(VALUES if self.kind == "word" else ()))
        return scoring.judge(answer, example.answers, metric=self.metric, rivals=rivals)


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One length and depth of the grid on one corpus."""

    task: Needle
    tokens: Tokens
    corpus: str
    prose: Prose
    length: int
    depth: float

    def examples(self, seed: int, index: int) -> list[Example]:
        """The examples of the context with this index; drawn again if a key or value occurs elsewhere in the prose."""
        task, n = self.task, self.task.questions
        rng = random.Random(hashlib.sha256(f"{seed}|{self.length}|{self.depth}|{index}".encode()).digest())
        for number in range(_DRAWS):
            depths = [self._depth(i) for i in range(n)] + [rng.random() for _ in range(task.distractor_needles)]
            hidden = draw(task.needle, task.kind, depths, rng)
            asked = self._asked(hidden[:n])
            longest = max(asked, key=lambda one: -self._missing("", *one))
            haystack, room = self._haystack(hidden, *longest, rng)
            inside = number >= _NATURAL
            context = self._fit(haystack, room, hidden, *longest, inside=inside)
            if context is None or not found_once(hidden, context, "".join(map("".join, asked))):
                continue
            hidden = placed(hidden, context.removeprefix(self._context("")), self._plain)
            if inside or all(abs(one.stands - one.depth) <= OFF for one in hidden[:n]):
                name, group = f"{task.kind}-{self.length}-{self.depth}-{index}", f"{self.corpus}:{haystack.origin}"
                return [self._example(name, i, asked[i], context, hidden, group) for i in range(n)]
        raise UserError(
            f"corpus {self.corpus} has no haystack of exactly {self.length} tokens with the needle's key and "
            f"value once only, in {_DRAWS} draws: change the corpus, the texts of the task or task.lengths"
        )

    def _example(
        self, name: str, i: int, asked: tuple[str, str], context: str, hidden: Sequence[Hidden], group: str
    ) -> Example:
        """The example that asks about needle i."""
        task, several = self.task, self.task.questions > 1
        return Example(
            id=f"{name}-{i + 1}" if several else name,
            context=context,
            question=asked[0],
            answer_prefix=asked[1],
            answers=(hidden[i].value,),
            group_id=group,
            length=self.length,
            depth=hidden[i].depth,
            depth_realised=hidden[i].stands,
            max_new_tokens=task.answer_room,
            stop=tuple(task.stop),
            distractors=tuple(one.value for one in hidden if one is not hidden[i]),
            order=i + 1 if several else None,
        )

    def _depth(self, i: int) -> float:
        """Depth of needle i."""
        depth = self.depth + i / self.task.questions  # exactly the cell's for the first
        return round(depth - (depth > 1), 4) if i else depth

    def _asked(self, hidden: Sequence[Hidden]) -> list[tuple[str, str]]:
        """(question, answer prefix) for each needle: what is compressed with the context, and what is fed later."""
        task = self.task
        texts = [[fill(text, task.kind, one.key) for text in (task.question, task.answer_prefix)] for one in hidden]
        asked = [set_apart(*pair, chat=task.chat) for pair in texts]
        first, *later = asked
        return asked if task.aware_of == "own" else [first, *((first[0], "".join(pair)) for pair in later)]

    def _haystack(
        self, hidden: Sequence[Hidden], question: str, answer_prefix: str, rng: random.Random
    ) -> tuple[Haystack, int]:
        """Prose for this prompt, a little more than fits, and about how many tokens of it will fit."""
        answer_room, lengths = self.task.answer_room, list(self.task.lengths)
        answer = max(self._plain(" " + one.value) for one in hidden)
        require(answer <= answer_room, "task.max_new_tokens", answer_room, f"the value alone takes {answer} tokens")
        room = self._missing(self._context("".join(" " + one.sentence for one in hidden)), question, answer_prefix)
        require(room > 0, "task.lengths", lengths, f"template, needle and answer room need {self.length - room + 1} tokens")
        wanted = room + room // 64 + 16  # sentences tokenized apart and together differ by a few
        haystack = self.prose.draw(wanted, self._plain, rng)
        if haystack is None:
            raise UserError(
                f"corpus {self.corpus} is too short for task.lengths={lengths}: "
                f"a prompt of {self.length} tokens takes {wanted} tokens of prose"
            )
        return haystack, room

    def _fit(
        self, haystack: Haystack, room: int, hidden: Sequence[Hidden], question: str, answer_prefix: str, *, inside: bool
    ) -> str | None:
        """The context that makes the prompt exactly as long as asked, or None if no cut of this prose does."""
        inserts = [(one.depth, one.sentence) for one in hidden]
        for _ in range(8):
            context = self._context(haystack.text(room, inserts, self._plain, inside=inside))
            missing = self._missing(context, question, answer_prefix)
            if not missing:
                return context
            room = max(0, room + missing)
        return None

    def _missing(self, context: str, question: str, answer_prefix: str) -> int:
        """Tokens between prompt + answer room and the length asked."""
        ids = self.tokens.prompt(context, question, answer_prefix, chat=self.task.chat).ids
        return self.length - self.task.answer_room - len(ids)

    def _context(self, text: str) -> str:
        return f"{fill(self.task.intro, self.task.kind, '')}\n\n{text}" if self.task.intro else text

    def _plain(self, text: str) -> int:
        """Tokens of a text inside a longer one: some tokenizers add a space at the start of a text."""
        return len(self.tokens.encode("\n" + text)) - len(self.tokens.encode("\n"))
