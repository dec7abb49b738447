"""Needles stand at the asked share of the prose they are put into, and examples say where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from harness.types import Example
from tasks.corpus import StandardLibrary
from tasks.docqa import DocQA
from tasks.needle import Needle
from tests.support.byte_tokens import ByteTokens
from tests.support.texts import Text

BYTES = ByteTokens()
PROSE = StandardLibrary(name="stdlib", licence="PSF-2.0")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def share(example: Example, sentences: Sequence[str] = ()) -> float:
    """Bytes of prose before the needle, over all prose; a byte is a token here."""
    start = example.context.index(example.answers[0])
    before, after = example.context[:start].rpartition("The special")[0], example.context[start:].partition(".")[2]
    n, m = len(before.strip().encode()), len(after.strip().encode())
    return n / (n + m)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [420, 700, 2000])
def test_a_needle_stands_where_it_was_asked(length: int, chat: bool) -> None:
    """Short prompts hold a few sentences: the nearest boundary was up to half of the prose away from the depth asked."""
    for example in Needle(lengths=(length,), depths=DEPTHS, per_cell=8, chat=chat).examples(BYTES, PROSE, seed=0):
        assert example.depth is not None and example.depth_realised is not None
        assert abs(example.depth_realised - share(example)) <= 0.01
        assert abs(example.depth_realised - example.depth) <= 0.08


def test_prose_without_sentences_is_parted_between_two_words() -> None:
    corpus = Text((" ".join(f"word{i}" for i in range(4000)),))
    for example in Needle(lengths=(600,), depths=DEPTHS, per_cell=2).examples(BYTES, corpus, seed=0):
        assert abs(share(example) - (example.depth or 0)) <= 0.05
        before, after = example.context.split("The special magic")[0], example.context.split(example.answers[0] + ".")[1]
        pieces = before.split() + after.split()
        assert all(piece.startswith("word") for piece in pieces[1:])  # no word was cut in two by the needle
        assert f"{before.rstrip()}{after}".strip() in corpus.texts[0]


def test_prose_without_spaces_is_parted_between_two_letters() -> None:
    corpus = Text(("".join(f"{i}-" for i in range(3000)),))
    for example in Needle(lengths=(900,), depths=DEPTHS).examples(BYTES, corpus, seed=0):
        assert abs(share(example) - (example.depth or 0)) <= 0.05


def test_each_of_several_needles_says_where_it_stands() -> None:
    task = Needle(lengths=(900,), depths=(0.1,), per_cell=4, questions=3, distractor_needles=2, intro="Read this.")
    for example in task.examples(BYTES, PROSE, seed=1):
        assert example.depth is not None and example.depth_realised is not None
        assert abs(example.depth_realised - example.depth) <= 0.08


@dataclass(frozen=True)
class Made:
    def reports(self) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
        return {
            f"{n}": {
                "Government": {"Country name": {"conventional short form": {"text": f"Land{n}"}}},
                "Facts": {f"Field {i}": {"text": f"{1000 * n + i} units"} for i in range(12)},
            }
            for n in range(1, 9)
        }


def test_records_of_reports_say_it_unrounded() -> None:
    for example in DocQA(reports=Made(), lengths=(900,), per_length=6, fields=(5, 8)).examples(BYTES, None, seed=0):
        assert example.depth is not None and example.depth_realised is not None
        assert example.depth == round(example.depth_realised, 1)
        at = example.context.index(example.answers[0]) / len(example.context)
        assert abs(at - example.depth_realised) <= 0.05
    alone = DocQA(reports=Made(), lengths=(900,), per_length=1, fields=(5, 8), baseline="no_context")
    assert alone.examples(BYTES, None, seed=0)[0].depth_realised is None
