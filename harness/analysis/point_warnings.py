"""What a reader of a point should be warned of, from its records: short texts, each beginning with its name.

A new warning is a function over the records of one point (every example once) and its name here; `glossary` says what it
means. It returns what was seen, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]

EMPTY_SHARE = 0.2  # of the answers, from which empty ones are worth a warning
COMPRESSED_SHARE = 0.5  # of a stream's scored tokens, below which its score says little about the cache


def warnings(records: Sequence[Record], *, base: bool = False) -> str | None:
    """All warnings of a point, joined by "; ", None where there are none; of the full cache only those about answers."""
    names = [name for name in WARNINGS if not (base and name in _OF_COMPRESSION)]
    found = [f"{name}: {text}" for name in names if (text := WARNINGS[name](records)) is not None]
    return "; ".join(found) or None


def is_empty(record: Record) -> bool:
    """Whether the model was asked for an answer and gave none: no text, or only white space."""
    answered = record["status"] in ("ok", "not_exercised")
    return answered and record["output"] is not None and not record["output"].strip()


def _other_budget(records: Sequence[Record]) -> str | None:
    """The budgets of the layers are others than was asked, as a record says it: "uniform (asked: pyramid)"."""
    texts = Counter(str(text) for record in records if "(asked: " in str(text := record.get("layer_budget")))
    return _of("examples", texts, len(records))


def _few_compressed(records: Sequence[Record]) -> str | None:
    """A stream of which most scored tokens read a cache that was still exact."""
    known = [record for record in records if record.get("chunk") and record.get("compressed_share") is not None]
    weights = np.array([float(record["weight"]) for record in known])
    if not weights.sum() > 0:
        return None
    share = float(np.average([float(record["compressed_share"]) for record in known], weights=weights))
    return f"{100 * share:.3g} % of the scored tokens read a compressed store" if share < COMPRESSED_SHARE else None


def _empty(records: Sequence[Record]) -> str | None:
    asked = [record for record in records if record["status"] in ("ok", "not_exercised") and record["output"] is not None]
    empty = sum(map(is_empty, asked))
    return f"{empty} of {len(asked)} answers" if empty and empty >= EMPTY_SHARE * len(asked) else None


def _truncated(records: Sequence[Record]) -> str | None:
    cut = sum(bool(record["truncated"]) for record in records)
    return f"{cut} of {len(records)} prompts, left out of the score" if cut else None


def _of(what: str, found: Counter[str], n: int) -> str | None:
    texts = [text if count == n else f"{text} in {count} of {n} {what}" for text, count in found.items()]
    return ", ".join(texts) or None


WARNINGS: dict[str, Callable[[Sequence[Record]], str | None]] = {
    "layer budget": _other_budget,
    "few compressed reads": _few_compressed,
    "empty answers": _empty,
    "truncated prompts": _truncated,
}
_OF_COMPRESSION = ("layer budget", "few compressed reads")
