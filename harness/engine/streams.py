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
    """One document under one stack; `reference` is the index of the reading beside it to compare distributions with."""

    ids: tuple[int, ...]
    row: SequenceCache  # what the stream starts from: empty, or the compressed context
    reference: int


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
    while live := [i for i, reading in enumerate(readings) if out[i].row.seen < len(reading.ids) - 1]:
        each = [_next(readings[i], one.row.seen, chunk) for i, one in enumerate(out)]
        live = batch.form(live, [one.row for one in out], [len(fed) for fed, _ in each])
        chunks = [each[i] for i in live]
        where = {i: b for b, i in enumerate(live)}
        references = [where[readings[i].reference] for i in live]
        step = engine.read([out[i].row for i in live], [fed for fed, _ in chunks], references, batch)
        wanted = _wanted([targets for _, targets in chunks], step.logits_BLV.device)
        for b, i in enumerate(live):
            fed, targets = chunks[b]
            out[i].compressed += len(targets) * (out[i].row.touched() > 0)
            _record(out[i], step.rows[b], step.grown_bytes[b], len(fed), engine)
            logits_LV = step.logits_BLV[b, : len(fed)]
            _score(out[i], logits_LV, step.logits_BLV[where[readings[i].reference], : len(fed)], wanted[b])
            out[i].errors = out[i].errors + step.errors[:, b]
        steps += 1
        if steps % TRIM_EVERY == 0:
            give_back()
    seconds = engine.clock() - start
    fine = fetched([torch.stack((one.all_sound, one.all_reference_sound)) for one in out])
    for one, flags in zip(out, fine, strict=True):
        one.seconds, (one.sound, one.reference_sound) = seconds, flags.tolist()
    return out


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


def _wanted(targets: Sequence[Sequence[int]], device: torch.device) -> Sequence[Tensor]:
    """The next tokens of every reading, sent in one go."""
    flat = torch.tensor([token for one in targets for token in one], device=device)
    parts: Sequence[Tensor] = flat.split([len(one) for one in targets])  # type: ignore[no-untyped-call]
    return parts


def _score(out: Read, logits_LV: Tensor, reference_LV: Tensor, wanted: Tensor) -> None:
    out.all_sound = sound(logits_LV).all() & out.all_sound
    out.all_reference_sound = sound(reference_LV).all() & out.all_reference_sound
    logp_LV = logits_LV.float().log_softmax(-1)
    out.nll.append(-logp_LV.gather(1, wanted[:, None])[:, 0])
    if logits_LV is reference_LV or logits_LV.data_ptr() == reference_LV.data_ptr():
        out.kl.append(torch.zeros(len(wanted)))
        out.agree.append(torch.ones(len(wanted)))
        return
    ref_LV = reference_LV.float().log_softmax(-1)
    out.kl.append(divergence(ref_LV, logp_LV))
    out.agree.append((ref_LV.argmax(-1) == logp_LV.argmax(-1)).float())
