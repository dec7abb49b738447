"""Consecutive sentences of real prose, cut to a number of tokens."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from harness.types import Corpus

_ABBREVIATION = r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bProf\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\b[A-Z]\.)"
_MAY = r"(?=[.!?…。！？\s])"  # what an end starts with: looked at first, as most characters are none of these
_END = re.compile(rf"{_MAY}(?:(?:\.{_ABBREVIATION}|[!?…])+[\"'”’)\]]*(?=\s)|[。！？]+[」』”]*|(?<=\S)(?=\s*\n\s*\n))(?=\s*\S)")
OFF = 0.05  # share of the prose by which a needle may miss its depth for the sake of a sentence boundary
_LONGEST = 1000  # characters; text without sentence ends is cut at white space instead
_RUN = re.compile(rf"(?s)\s*\S.{{0,{_LONGEST}}}(?=\s|\Z)|.{{1,{_LONGEST}}}")

Count = Callable[[str], int]


@dataclass(frozen=True)
class Prose:
    """A corpus as sentences, each with the white space before it, so that joined neighbours are the text."""

    sentences: tuple[str, ...]
    origins: tuple[str, ...]  # per sentence: document and number within it

    @staticmethod
    def of(corpus: Corpus) -> Prose:
        """All sentences of a corpus, with a blank line between documents."""
        sentences: list[str] = []
        origins: list[str] = []
        for number, document in enumerate(corpus.documents()):
            found = _sentences(document.strip())
            sentences += ["\n\n" + found[0], *found[1:]] if found else []
            origins += [f"{number}:{i}" for i in range(len(found))]
        return Prose(tuple(sentences), tuple(origins))

    def draw(self, room: int, count: Count, rng: random.Random) -> Haystack | None:
        """Sentences of at least `room` tokens from a random start, uniform over starts with enough text behind.

        None if the corpus is shorter.
        """
        limit = len(self.sentences)
        while limit:
            start = rng.randrange(limit)
            counts: list[int] = []
            held = 0
            for sentence in self.sentences[start:]:
                counts.append(count(sentence))
                held += counts[-1]
                if held >= room:
                    return Haystack(self.sentences[start : start + len(counts)], tuple(counts), self.origins[start])
            limit = start
        return None


@dataclass(frozen=True)
class Haystack:
    """Neighbouring sentences with their token counts, and where they come from."""

    sentences: tuple[str, ...]
    counts: tuple[int, ...]
    origin: str

    def text(self, room: int, inserts: Sequence[tuple[float, str]], count: Count, *, inside: bool = False) -> str:
        """The last `room` tokens, with each insert at the sentence boundary nearest its depth.

        Args:
            room: Tokens of prose; the first sentence loses its start to make the number exact.
            inserts: (depth, text) pairs; depth in 0..1 is the share of the prose's tokens before it.
            count: Tokens of a text.
            inside: Whether an insert may be placed inside a sentence, between words, if no boundary is within OFF of its depth.
        """
        first, behind = len(self.sentences), 0
        while first and behind < room:
            first -= 1
            behind += self.counts[first]
        spare = behind - room
        head = cut(self.sentences[first], self.counts[first] - spare, count)
        kept = (head, *self.sentences[first + 1 :])
        ends = [0, *accumulate((self.counts[first] - spare, *self.counts[first + 1 :]))]
        if inside:
            for depth, _ in inserts:
                kept, ends = _parted(kept, ends, depth, count)
        parts: list[list[str]] = [[] for _ in ends]
        for depth, text in sorted(inserts):
            parts[min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))].append(" " + text)
        for sentence, after in zip(kept, parts[1:], strict=True):
            after.insert(0, sentence if sentence[:1].isspace() or not sentence else " " + sentence)
        return "".join(text for part in parts for text in part).strip()


def _parted(kept: tuple[str, ...], ends: list[int], depth: float, count: Count) -> tuple[tuple[str, ...], list[int]]:
    """Sentences and their ends in tokens, with one split in two if none ends within OFF of a depth."""
    wanted = depth * ends[-1]
    if min(abs(end - wanted) for end in ends) <= OFF * ends[-1]:
        return kept, ends
    at = bisect_left(ends, wanted) - 1
    sentence, tokens = kept[at], wanted - ends[at]
    gaps = [m.start() for m in re.finditer(r"(?<=\S)\s+(?=\S)", sentence)] or list(range(1, len(sentence)))
    if not gaps:
        return kept, ends
    near = bisect_left(gaps, tokens, key=lambda i: count(sentence[:i]))
    gap = min(gaps[max(0, near - 1) : near + 1], key=lambda i: abs(count(sentence[:i]) - tokens))
    halves = (sentence[:gap], sentence[gap:])
    return (*kept[:at], *halves, *kept[at + 1 :]), [*ends[: at + 1], ends[at] + count(halves[0]), *ends[at + 1 :]]


def cut(sentence: str, room: int, count: Count) -> str:
    """The end of a sentence with `room` tokens: cut before a word if that is exact, else within one.

    If no cut is exact: the longest end below.
    """
    starts = [match.start() for match in re.finditer(r"\S+", sentence)]
    at = bisect_left(starts, -room, key=lambda i: -count(sentence[i:]))
    below = starts[at] if at < len(starts) else len(sentence)
    if at == 0 or count(sentence[below:]) == room:
        return sentence[below:]
    inside = range(starts[at - 1] + 1, below)
    near = bisect_left(inside, -room, key=lambda i: -count(sentence[i:]))
    for i in inside[max(0, near - 8) : near + 8]:
        if count(sentence[i:]) == room:
            return sentence[i:]
    return sentence[below:]


def _sentences(document: str) -> list[str]:
    starts = [0, *(match.end() for match in _END.finditer(document)), len(document)]
    found = [document[a:b] for a, b in pairwise(starts) if document[a:b].strip()]
    return [run for sentence in found for run in ([sentence] if len(sentence) <= _LONGEST else _RUN.findall(sentence))]
