"""What the forward passes of an engine take and give back: token ids, sequence caches and logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs, Stats


@dataclass(frozen=True)
class Prefix:
    """The exact cache of a context, read-only, with the statistics that the stacks asked for, per layer."""

    row: SequenceCache
    stats: tuple[Stats, ...]
    seconds: float

    def nbytes(self, needs: Needs) -> int:
        """Bytes that a stack with these needs would hold while the context is read: exact tokens and its own statistics."""
        return self.row.bytes().total + sum(one.only(needs).nbytes for one in self.stats)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one sequence cache is fed and when it stops; `stop` sees all generated ids after each one."""

    row: SequenceCache
    held: Sequence[int]
    max_new: int
    stop: Callable[[Sequence[int]], bool] = lambda ids: False

    def ended(self, ids: Sequence[int]) -> str:
        """Why it stops after these generated ids; empty if it goes on."""
        if self.stop(ids):
            return "stop"
        return "length" if len(ids) >= self.max_new else ""


@dataclass(frozen=True)
class Answer:
    """Generated ids (an EOS that ended them left out), why they ended, the cache afterwards and its largest total bytes.

    touched: entries evicted or stored inexactly in the store that the last token was predicted from.
    """

    ids: tuple[int, ...]
    stop_reason: str  # eos | stop | length | unsound: logits that are no distribution
    row: SequenceCache
    peak: int
    seconds: float  # of the whole batch
    touched: int = 0


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of the target tokens, whether greedy decoding would have given them, and the cache afterwards.

    sound: whether all logits that were read were distributions.
    """

    logp: tuple[float, ...]
    greedy: bool
    row: SequenceCache
    peak: int  # bytes with all tokens joined, before any was evicted
    sound: bool = True


@dataclass(frozen=True)
class TextScore:
    """Consecutive tokens of a text: log-probability, whether it was the most likely one, and whether it was predicted from a
    store that had lost something. Of a window only the tokens that it scores.
    """

    logp: tuple[float, ...] = ()
    top: tuple[bool, ...] = ()
    compressed: tuple[bool, ...] = ()

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(self.logp + other.logp, self.top + other.top, self.compressed + other.compressed)

    def last(self, n: int) -> TextScore:
        """The last n tokens."""
        assert 0 < n <= len(self.logp)
        return TextScore(self.logp[-n:], self.top[-n:], self.compressed[-n:])

    @property
    def total(self) -> float:
        """The log-likelihood."""
        return sum(self.logp)

    @property
    def greedy(self) -> bool:
        """Whether every token was the most likely one."""
        return all(self.top)

    @property
    def scored(self) -> int:
        """How many tokens there are."""
        return len(self.logp)

    @property
    def exercised(self) -> int:
        """How many of them were predicted from a store that had lost something."""
        return sum(self.compressed)


@dataclass(frozen=True)
class Step:
    """Sequence caches after a chunk, its logits [B, L, V], bytes before eviction, and attention-output errors.

    errors: fp64 [layers, B, 2], for each cache |out - reference|^2 and |reference|^2 summed over the chunk.
    members: for each cache, its row of the logits: caches that read the same share one.
    """

    rows: list[SequenceCache]
    logits_BLV: Tensor
    grown_bytes: list[int]
    errors: Tensor
    members: Sequence[int] = ()


def inputs(ids: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions [B, L] of new tokens; starts: the position of each sequence's first one.

    Shorter ones are padded on the right: causal attention never sees those tokens, and nothing of them is stored.
    """
    width = max(map(len, ids))
    if width == 1:  # every token of an answer: arrays would take longer
        both = torch.tensor([[list(one) for one in ids], [[start] for start in starts]])
    else:
        both = torch.zeros(2, len(ids), width, dtype=torch.long)
        for row, places, one, start in zip(*both.numpy(), ids, starts, strict=True):
            end = start + len(one)
            row[: len(one)] = one
            places[: len(one)] = np.arange(start, end)
            places[len(one) :] = end - 1  # a model with learned positions has none beyond its limit
    ids_BL, positions_BL = both.to(device).unbind(0)  # sent in one go
    return ids_BL, positions_BL
