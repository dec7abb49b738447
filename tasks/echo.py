"""Answers that only repeat the question, for questions that contain their own answer."""

from __future__ import annotations

from collections.abc import Sequence

from harness.types import Example
from tasks import scoring

LONGER = 8  # words beyond the answer: from there on, words in the order of the question are a repetition


def holds_answer(example: Example) -> bool:
    """Whether a reference occurs in the question or the answer prefix."""
    return any(scoring.occurrences(text, one) for text in _asked(example) for one in example.answers)


def is_answer(example: Example) -> bool:
    """Whether question, answer prefix or both are a reference and nothing else: an echo and an answer would be the same."""
    said = {scoring.normalise(text) for text in _asked(example)}
    return any(scoring.normalise(one) in said for one in example.answers if scoring.normalise(one))


def notices(examples: Sequence[Example]) -> list[str]:
    """Warnings about examples that contain their own answer."""
    found = [example.id for example in examples if holds_answer(example)]
    return found and [
        f"the answer occurs in its own question or answer prefix in {len(found)} of {len(examples)} examples "
        f"(the first: {found[0]}); repeating those does not count as an answer"
    ]


def without_echo(answer: str, example: Example) -> str:
    """The answer without its repetition of question and answer prefix, normalised; unchanged if nothing is repeated.

    A repetition contains a reference and is the whole question, the whole prefix or both in a row; or it begins as the
    question does and goes on to the end of the answer (an answer cut off at its last token); or it follows the question for
    LONGER words more than the reference has words. A reference alone, or with a few words around it, is an answer.
    """
    pieces = [scoring.normalise(text).split() for text in _asked(example)]
    references = [one.split() for one in map(scoring.normalise, example.answers) if one]
    held = [one for one in references if any(_stands(one, piece) for piece in pieces)]
    if not held:
        return answer
    words = scoring.normalise(answer).split()
    kept: list[str] = []
    at = 0
    while at < len(words):
        n = _repeated(words[at:], pieces, held)
        kept += [] if n else [words[at]]
        at += n or 1
    return answer if len(kept) == len(words) else " ".join(kept)


def _asked(example: Example) -> list[str]:
    texts = (example.question + example.answer_prefix, example.question, example.answer_prefix)
    return [text for text in texts if text.strip()]


def _repeated(words: Sequence[str], pieces: Sequence[list[str]], held: Sequence[list[str]]) -> int:
    """Number of first words that are a repetition."""
    for piece in pieces:
        if _stands_any(held, piece) and list(words[: len(piece)]) == piece:
            return len(piece)
    for piece in pieces:
        for start in range(len(piece)):
            run = _common(words, piece[start:])
            inside = [len(one) for one in held if _stands(one, words[:run])]
            rest, due = list(words[run:]), piece[start + run : start + run + 1]
            cut_off = start == 0 and (not rest or (len(rest) == 1 and bool(due) and due[0].startswith(rest[0])))
            if inside and run >= max(inside) + (1 if cut_off else LONGER):
                return run
    return 0


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _stands(few: Sequence[str], many: Sequence[str]) -> bool:
    return any(list(many[i : i + len(few)]) == list(few) for i in range(len(many) - len(few) + 1))


def _stands_any(held: Sequence[list[str]], piece: Sequence[str]) -> bool:
    return any(_stands(one, piece) for one in held)
