"""Contents of needles: keys, values and their sentences, drawn from a given generator."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tasks import scoring
from tasks.words import KEYS, VALUES

# kind -> tokens of answer room: the longest value, byte by byte, and a little
KINDS = {"number": 10, "word": 12, "uuid": 48}


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """One needle: depth asked for (0..1), key, value, sentence, and realised depth."""

    depth: float
    key: str
    value: str
    sentence: str
    stands: float = math.nan


def draw(template: str, kind: str, depths: Sequence[float], rng: random.Random) -> list[Hidden]:
    """One needle for each depth; no two share a key or a value."""
    keys = rng.sample(KEYS, len(depths))
    return [
        Hidden(depth=depth, key=key, value=value, sentence=fill(template, kind, key).replace("{value}", value))
        for depth, key, value in zip(depths, keys, _values(kind, len(depths), rng), strict=True)
    ]


def fill(template: str, kind: str, key: str) -> str:
    """A text with {kind} and {key} filled in."""
    return template.replace("{kind}", kind).replace("{key}", key)


def found_once(hidden: Sequence[Hidden], context: str, asked: str) -> bool:
    """Whether each needle occurs once in the context, its key and value nowhere else, and no value in the question."""
    return all(
        context.count(one.sentence) == 1
        and scoring.occurrences(context, one.value) == 1
        and scoring.occurrences(context, one.key) == scoring.occurrences(one.sentence, one.key)
        and not scoring.occurrences(asked, one.value)
        for one in hidden
    )


def placed(hidden: Sequence[Hidden], text: str, count: Callable[[str], int]) -> list[Hidden]:
    """The needles with their realised depths in a text: the share of the prose's tokens before them, needles not counted."""
    found = []
    for one in hidden:
        before, _, after = text.partition(one.sentence)
        for other in hidden:
            before, after = before.replace(other.sentence, ""), after.replace(other.sentence, "")
        tokens = count(before.strip())
        found.append(replace(one, stands=round(tokens / max(tokens + count(after.strip()), 1), 4)))
    return found


def _values(kind: str, n: int, rng: random.Random) -> list[str]:
    if kind == "number":
        return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), n)]
    if kind == "word":
        return rng.sample(VALUES, n)
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(n)]
