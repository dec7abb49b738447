"""The log-likelihood of a window of a text that is scored as a whole.

Such a text has no context that could be compressed first. So a window is read in two halves: the first one exactly (every stack
gives the same numbers there), then it is compressed, and the second half is fed through the compressed store in chunks, each
token predicted by a forward that reads the store. How many tokens that are is part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.engine.answers import Scored, TextScore
from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND, scored
from harness.engine.time_limit import limited
from harness.kv.sequence_cache import SequenceCache

CHUNK = 32  # tokens fed to a compressed store at once
EXACT_CHUNK = 256  # tokens of the exact half at once: bounds the logits held
SHORTEST = 64  # ids; a shorter window is read exactly, whatever the stack


def first_half(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that are compressed before the rest is read; none of a window that is too short for it."""
    return ids[: len(ids) // 2] if len(ids) >= SHORTEST else ()


def exact_half(engine: Engine, ids: Sequence[int], half: int) -> tuple[TextScore, Scored]:
    """Scores of the tokens up to and with number `half` (0: of all) under the full cache, and how that ends.

    Raises:
        ArithmeticError: the logits are no distribution.
    """
    with limited(engine):
        ((text, end),) = _tokens(engine, [engine.start(length=len(ids) - 1)], ids[: half + 1] if half else ids, EXACT_CHUNK)
    if not end.sound:
        raise ArithmeticError(UNSOUND)
    return text, end


def rest(engine: Engine, caches: Sequence[SequenceCache], ids: Sequence[int]) -> list[tuple[TextScore, Scored]]:
    """Scores of what the caches, which have seen equally much, have not seen of `ids`; and how each of them ends."""
    return _tokens(engine, caches, ids, CHUNK)


def _tokens(engine: Engine, caches: Sequence[SequenceCache], ids: Sequence[int], chunk: int) -> list[tuple[TextScore, Scored]]:
    """Feed the rest of `ids`, each token predicting the next."""
    caches, seen = list(caches), caches[0].seen
    found, peaks, fine = [TextScore()] * len(caches), [0] * len(caches), [True] * len(caches)
    while seen < len(ids) - 1:
        end = min(seen + chunk, len(ids) - 1)
        step = engine.read(caches, [ids[seen:end]] * len(caches))
        marks = scored(list(step.logits_BLV), [ids[seen + 1 : end + 1]] * len(caches))
        for b, one in enumerate(marks):
            found[b] += TextScore(one.logp, one.top, (caches[b].touched() > 0,) * (end - seen))
            peaks[b], fine[b] = max(peaks[b], step.grown_bytes[b]), fine[b] and all(one.sound)
        caches, seen = step.rows, end
    ends = zip(caches, peaks, fine, strict=True)
    return [(text, Scored((), False, *end)) for text, end in zip(found, ends, strict=True)]
