"""One exact prefill, many stacks, in lockstep: everything here is token ids; it knows no text, no task and no record.

A wave is a list of rows, one per (example, stack, point). Projections and MLPs are shared matrix products; attention reads
each row's own store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.kv.attention import CURRENT, NAME, Forward
from harness.kv.cache import Row
from harness.kv.compat import EntryCache, forward, shape_of
from harness.stages.protocols import Needs, Stats
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Prefix:
    """The exact cache of a context, read-only, with the statistics that the stacks asked for, per layer."""

    row: Row
    stats: tuple[Stats, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes held while the context is being read: exact rows and statistics."""
        stats = [t for s in self.stats for t in (s.column_sums_HN, s.queries_QWD) if t is not None]
        return self.row.bytes().total + sum(t.untyped_storage().nbytes() for t in stats)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one row is fed and when it stops; `stop` sees all generated ids after each one."""

    row: Row
    held: Sequence[int]
    max_new: int
    stop: Callable[[Sequence[int]], bool] = lambda ids: False


@dataclass(frozen=True)
class Answer:
    """Generated ids (an EOS that ended them left out), why they ended, the row afterwards and its largest total bytes."""

    ids: tuple[int, ...]
    stop_reason: str  # eos | stop | length
    row: Row
    peak: int
    seconds: float  # of the whole wave


class Engine:
    """Runs a decoder on token ids through our stores.

    The model must be loaded with attn_implementation="kv_harness". kv_dtype: K and V are rounded to it once, on entry.
    """

    def __init__(self, model: PreTrainedModel, kv_dtype: torch.dtype, eos: Sequence[int] = ()) -> None:
        assert model.config.get_text_config(decoder=True)._attn_implementation == NAME
        self.model, self.kv_dtype, self.eos = model, kv_dtype, frozenset(eos)
        self.shape = shape_of(model.config)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], needs: Needs = Needs()) -> Prefix:  # noqa: B008 frozen
        """Read a context exactly, in one forward, recording what `needs` asks for."""
        start = time.perf_counter()
        row, run, _ = self._forward([Row.empty(self.shape)], [ids], [needs])
        stats = tuple(run.stats[i][0][0] for i in range(len(self.shape.layers)))
        return Prefix(row[0], stats, time.perf_counter() - start)

    @torch.inference_mode()
    def compress(self, prefix: Prefix, stack: Stack, seed: int = 0) -> Row:
        """The context under one stack; the prefix is not changed. UserError when the budget is too small for it."""
        return prefix.row.compress(stack, prefix.stats, seed, self.model.dtype)

    @torch.inference_mode()
    def feed(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> tuple[list[Row], Tensor]:
        """Feed each row its own tokens (numbers may differ); returns the rows afterwards and the last logits [B, V]."""
        grown, run, logits = self._forward(rows, ids, self._step_needs(rows, range(len(rows))))
        return [row.settled(run, b) for b, row in enumerate(grown)], logits

    @torch.inference_mode()
    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Greedy decoding of a wave in lockstep: held-back tokens first, then one token a step; finished rows leave."""
        start = time.perf_counter()
        rows, feed = [ask.row for ask in asks], [list(ask.held) for ask in asks]
        out: list[list[int]] = [[] for _ in asks]
        peak, reasons, live = [row.bytes().total for row in rows], [""] * len(asks), list(range(len(asks)))
        while live:
            grown, run, logits = self._forward([rows[i] for i in live], [feed[i] for i in live], self._step_needs(rows, live))
            for b, (i, token) in enumerate(zip(live, logits.argmax(-1).tolist(), strict=True)):
                if rows[i].stack.evicts_steps:
                    peak[i] = max(peak[i], grown[b].bytes().total)
                rows[i], feed[i] = grown[b].settled(run, b), [token]
                reasons[i] = self._take(asks[i], out[i], token)
            live = [i for i in live if not reasons[i]]
        seconds = time.perf_counter() - start
        peak = [max(p, row.bytes().total) for p, row in zip(peak, rows, strict=True)]  # without eviction a row only grows
        return [Answer(tuple(o), r, row, p, seconds) for o, r, row, p in zip(out, reasons, rows, peak, strict=True)]

    def _step_needs(self, rows: Sequence[Row], which: Iterable[int]) -> list[Needs]:
        return [rows[i].stack.step_needs for i in which]

    def _take(self, ask: Ask, out: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        out.append(token)
        if ask.stop(out):
            return "stop"
        return "length" if len(out) >= ask.max_new else ""

    def _forward(
        self, rows: Sequence[Row], ids: Sequence[Sequence[int]], needs: Sequence[Needs]
    ) -> tuple[list[Row], Forward, Tensor]:
        lengths = [len(one) for one in ids]
        seen = [row.seen for row in rows]
        # Shorter rows are padded on the right: causal attention never sees those tokens, and nothing of them is stored.
        width, device = max(lengths), self.model.device
        ids_BL = torch.tensor([[*one, *[0] * (width - len(one))] for one in ids], device=device)
        positions_BL = torch.tensor(seen, device=device)[:, None] + torch.arange(width, device=device)
        last = sorted({n - 1 for n in lengths})
        run = Forward(self.shape, [row.layers for row in rows], seen, lengths, needs, self.kv_dtype)
        token = CURRENT.set(run)
        try:
            cache = EntryCache(len(self.shape.layers), self.kv_dtype)
            logits_BKV = forward(self.model, ids_BL, positions_BL, cache, torch.tensor(last, device=device))
        finally:
            CURRENT.reset(token)
        assert sorted(run.new) == list(range(len(self.shape.layers))), "a layer did not reach our attention"
        where = torch.tensor([last.index(n - 1) for n in lengths], device=device)
        logits_BV = logits_BKV[torch.arange(len(rows), device=device), where]
        return [row.after(run, b) for b, row in enumerate(rows)], run, logits_BV
