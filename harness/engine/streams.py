"""Reads token streams through many stacks in lockstep: every document's tokens go to all of its caches, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.engine.heap import give_back
from harness.engine.logits import divergence, sound
from harness.kv.memory import Budget
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from harness.stages.transfers import fetched
from harness.types import Bytes

TRIM_EVERY = 16  # steps between two times that freed memory is given back

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One document under one stack; `reference` is the index of the reading of the same document that it is compared with."""

    ids: tuple[int, ...]
    row: SequenceCache  # what the stream starts from: empty, or the compressed context
    reference: int


@dataclass(frozen=True)
class _Score:
    """A chunk of one reading, token by token; whether its logits, and those of its reference, are distributions."""

    nll: Tensor
    kl: Tensor
    agree: Tensor
    sound: Tensor  # of one flag, where the logits are
    reference_sound: Tensor


@dataclass
class Read:
    """What a reading gave, token by token: negative log-likelihood, KL to the reference, agreement of the top token.

    compressed: tokens that were predicted from a store that had lost something. sound, reference_sound: whether all logits, and
    those of the reference, were distributions.
    """

    row: SequenceCache
    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    byte_tokens: float = 0.0  # sum over chunks of bytes held times tokens fed
    full_byte_tokens: float = 0.0
    tokens: int = 0
    compressed: int = 0
    sound: bool = True
    reference_sound: bool = True
    all_sound: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.bool))  # so far, where the logits are
    all_reference_sound: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.bool))
    peak: int = 0
    most: Bytes = field(default_factory=lambda: Bytes({}, {}))
    errors: Tensor = field(default_factory=lambda: torch.zeros(()))  # fp64 [layers, 2]: |out - ref|^2, |ref|^2
    seconds: float = 0.0

    def add(self, score: _Score, errors: Tensor) -> None:
        """What a chunk gave; errors: of its attention outputs, [layers, 2]."""
        self.nll.append(score.nll)
        self.kl.append(score.kl)
        self.agree.append(score.agree)
        self.all_sound = score.sound & self.all_sound
        self.all_reference_sound = score.reference_sound & self.all_reference_sound
        self.errors = self.errors + errors

    def curve(self, name: str) -> Floats:
        """A token-by-token series as numbers."""
        chunks: list[Tensor] = getattr(self, name)
        return torch.cat(chunks).float().cpu().numpy() if chunks else np.zeros(0, np.float32)

    @property
    def compressed_share(self) -> float:
        """Share of the scored tokens that were predicted from a store that had lost something."""
        return self.compressed / max(self.tokens, 1)

    @property
    def mean_bytes(self) -> float:
        """Time mean of the bytes held between chunks."""
        return self.byte_tokens / max(self.tokens, 1)

    @property
    def mean_full_bytes(self) -> float:
        """The same of the uncompressed cache."""
        return self.full_byte_tokens / max(self.tokens, 1)


def context_cache(
    engine: Engine, prefix: Prefix, ids: Sequence[int], stack: Stack, seed: int, solved: Budget | None = None
) -> tuple[SequenceCache, int]:
    """A context under a stack and its peak bytes: the exact prefix compressed, or `ids` read in chunks where it wants that.

    solved: the budget, where it is known. UserError where the stack is not possible.
    """
    if stack.chunked:
        return engine.read_chunked(ids, [engine.start(stack, len(ids), seed, prefix.row.length or 0, solved)])[0]
    cache = engine.compress(prefix, stack, seed, solved)
    return cache, prefix.nbytes(stack.needs) + (cache.bytes().total if stack.compresses else 0)


def read(engine: Engine, readings: Sequence[Reading], chunk: int, views: int = 0) -> list[Read]:
    """Read all documents to their ends; ids beyond what a cache has seen are fed, each predicting the next.

    views: bytes that decoded copies of the stores may take between steps; they change no bit.
    """
    out = [Read(reading.row, peak=reading.row.bytes().total) for reading in readings]
    start, steps, batch = engine.clock(), 0, engine.batch(views)
    while going := [i for i, reading in enumerate(readings) if out[i].row.seen < len(reading.ids) - 1]:
        leader = _leaders(readings, [one.row for one in out], going)
        each = {i: _next(readings[i], out[i].row.seen, chunk) for i in going}
        lengths = [len(each[i][0]) if i in each else 0 for i in range(len(out))]
        fed = batch.form([i for i in going if leader[i] == i], [one.row for one in out], lengths)
        row = {i: b for b, i in enumerate(fed)}
        follow = [i for i in going if leader[i] != i]
        references = [row[leader[readings[i].reference]] for i in fed]
        beside = [(out[i].row, row[leader[i]]) for i in follow]
        step = engine.read([out[i].row for i in fed], [each[i][0] for i in fed], references, batch, beside)
        scores = _scores(step.logits_BLV, references, [each[i][1] for i in fed])
        for at, i in enumerate([*fed, *follow]):
            out[i].compressed += len(each[i][1]) * (out[i].row.touched() > 0)
            _record(out[i], step.rows[at], step.grown_bytes[at], len(each[i][0]), engine)
            out[i].add(scores[step.members[at]], step.errors[:, at])
        steps += 1
        if steps % TRIM_EVERY == 0:
            give_back()
    seconds = engine.clock() - start
    fine = fetched([torch.stack((one.all_sound, one.all_reference_sound)) for one in out])
    for one, flags in zip(out, fine, strict=True):
        one.seconds, (one.sound, one.reference_sound) = seconds, flags.tolist()
    return out


def _leaders(readings: Sequence[Reading], rows: Sequence[SequenceCache], going: Sequence[int]) -> dict[int, int]:
    """For each reading the one whose forward is its own too: the first of its text that, as itself, has lost nothing so far.

    Rows of a hybrid may be fed in several forwards, each by itself: they share none.
    """
    first: dict[object, int] = {}
    shares = {i: not (rows[i].unrotated or rows[i].touched() or rows[i].shape.hybrid) for i in going}
    return {i: first.setdefault((readings[i].reference, rows[i].seen) if shares[i] else i, i) for i in going}


def _next(reading: Reading, seen: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    stop = min(seen + chunk, len(reading.ids) - 1)
    return reading.ids[seen:stop], reading.ids[seen + 1 : stop + 1]


def _record(out: Read, cache: SequenceCache, grown: int, fed: int, engine: Engine) -> None:
    out.row = cache
    held = cache.bytes()
    out.byte_tokens += held.total * fed
    out.full_byte_tokens += engine.shape.full_bytes(cache.seen, engine.kv_dtype.itemsize) * fed
    out.tokens += fed
    out.peak = max(out.peak, grown)
    if held.total >= out.most.total:
        out.most = held


def _scores(logits_BLV: Tensor, references: Sequence[int], targets: Sequence[Sequence[int]]) -> list[_Score]:
    """Of every row, against the row of its reference, whose distributions are computed once."""
    compared = {b: logits_BLV[b, : len(targets[b])].float().log_softmax(-1) for b in set(references)}
    top = {b: logp_LV.argmax(-1) for b, logp_LV in compared.items()}
    fine = [sound(logits_BLV[b, : len(one)]).all() for b, one in enumerate(targets)]
    flat = torch.tensor([token for one in targets for token in one], device=logits_BLV.device)  # sent in one go
    wanted: Sequence[Tensor] = flat.split([len(one) for one in targets])  # type: ignore[no-untyped-call]
    out = []
    for b, (r, next_L) in enumerate(zip(references, wanted, strict=True)):
        logp_LV = compared[b] if b in compared else logits_BLV[b, : len(next_L)].float().log_softmax(-1)
        nll = -logp_LV.gather(1, next_L[:, None])[:, 0]
        kl, agree = torch.zeros_like(nll), torch.ones_like(nll)  # of a reference to itself
        if b != r:
            kl, agree = divergence(compared[r], logp_LV), (top[r] == logp_LV.argmax(-1)).float()
        out.append(_Score(nll, kl, agree, fine[b], fine[r]))
    return out
