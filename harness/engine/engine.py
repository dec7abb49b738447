"""One exact prefill, many stacks, in lockstep: everything here is token ids; it knows no text, no task and no record.

A wave is a list of rows, one per (example, stack, point). Projections and MLPs are shared matrix products; attention reads
each row's own store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.answers import Answer, Ask, Prefix, Scored, Step
from harness.engine.logits import sound
from harness.engine.tiles import prepare, tiles
from harness.errors import UserError
from harness.kv.attention import CURRENT, NAME, Forward
from harness.kv.batch_views import Batch
from harness.kv.compat import EntryCache, forward, layer_devices, shape_of
from harness.kv.memory import Budget, solve_budget
from harness.kv.positions import held, learned_positions, moving_rotary
from harness.kv.rope import ropes_of
from harness.kv.rope_check import tried
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


class Engine:
    """Runs a decoder on token ids through our stores.

    The model must be loaded with attn_implementation="kv_harness". kv_dtype: K and V are rounded to it once, on entry.
    invariant: a row's logits are the same bits whatever shares its batch; the prefill of a context is always alone.
    """

    def __init__(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, eos: Sequence[int] = (), *, invariant: bool = False
    ) -> None:
        assert model.config.get_text_config(decoder=True)._attn_implementation == NAME
        self.model, self.kv_dtype, self.eos, self.invariant = model, kv_dtype, frozenset(eos), invariant
        if invariant:
            prepare(model)
        self.shape = shape_of(model.config)
        n = len(self.shape.layers)
        devices = layer_devices(model, n)
        self.ropes, self.rope_moves = tried(model, self.shape, self.shape.groups(devices), *ropes_of(model, n))
        self.groups = self.shape.groups(devices, self.ropes)
        self.table, self.rotary = learned_positions(model), moving_rotary(model)

    def start(
        self,
        stack: Stack = Stack(),  # noqa: B008 frozen
        total: int = 0,
        seed: int = 0,
        length: int = 0,
        solved: Budget | None = None,
    ) -> SequenceCache:
        """A row that has seen nothing and compresses from its first token on.

        A fraction or byte budget is solved for `total` tokens. `length` tokens will be fed in all, `total` where it is not
        given. solved: the budget, where it is known. UserError when a budget is too small, or the model lacks what the stack or
        so many tokens need.
        """
        self.check(stack)
        self.check_length(length or total)
        budget = solved.tokens if solved else solve_budget(stack, self.shape, total, self.kv_dtype.itemsize)
        row = SequenceCache.empty(self.shape, stack, budget, seed, self.ropes)
        return row if self.rotary is None else replace(row, length=length or total)

    def check_length(self, tokens: int) -> None:
        """Refuse (UserError) more tokens than a learned position table has places for."""
        if self.table is not None and tokens > self.table:
            raise UserError(
                f"{tokens} tokens are beyond this model's positions: its learned table has {self.table}, and nothing follows it"
            )

    def check(self, stack: Stack) -> None:
        """Refuse (UserError) a stack that the model's positions do not allow."""
        kind = self.model.config.model_type
        if stack.positions == "cache" and None in self.ropes:
            raise UserError(
                f"compress.positions='cache' is not possible with model type {kind!r}: it has no rotary positions that can be "
                "turned back; legal is positions=original"
            )
        if stack.needs.query_moments and self.rope_moves:
            raise UserError(f"a scorer that predicts queries is not possible with model type {kind!r}: its rotation moves")

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], needs: Needs = Needs(), length: int = 0) -> Prefix:  # noqa: B008 frozen
        """Read a context exactly, in one forward, recording what `needs` asks for.

        `length`: tokens that will be fed in all, those of an answer included; as many as these where it is not given.
        """
        start = time.perf_counter()
        row, run, _ = self._forward([self.start(length=length or len(ids))], [ids], [needs], alone=True)
        stats = tuple(run.stats[i][0] for i in range(len(self.shape.layers)))
        return Prefix(row[0], stats, time.perf_counter() - start)

    @torch.inference_mode()
    def compress(self, prefix: Prefix, stack: Stack, seed: int = 0, solved: Budget | None = None) -> SequenceCache:
        """The context under one stack; the prefix is not changed. UserError when the budget is too small for it.

        solved: the budget, where it is known.
        """
        self.check(stack)
        return prefix.row.compress(stack, prefix.stats, seed, self.model.dtype, solved)

    @torch.inference_mode()
    def read_chunked(self, ids: Sequence[int], rows: Sequence[SequenceCache]) -> list[tuple[SequenceCache, int]]:
        """Read a context into empty rows, each in chunks of its own stack; the rows afterwards and their largest bytes."""
        rows, peak = list(rows), [0] * len(rows)
        while live := [i for i, row in enumerate(rows) if row.seen < len(ids)]:
            chunks = [ids[rows[i].seen : rows[i].seen + rows[i].stack.chunk] for i in live]
            grown, run, _ = self._forward([rows[i] for i in live], chunks)
            for b, i in enumerate(live):
                peak[i], rows[i] = max(peak[i], grown[b].bytes().total), grown[b].settled(run, b)
        return [(row.read(), p) for row, p in zip(rows, peak, strict=True)]

    @torch.inference_mode()
    def feed(self, rows: Sequence[SequenceCache], ids: Sequence[Sequence[int]]) -> tuple[list[SequenceCache], Tensor]:
        """Feed each row its own tokens (numbers may differ); returns the rows afterwards and the last logits [B, V]."""
        grown, run, logits = self._forward(rows, ids)
        return [row.settled(run, b) for b, row in enumerate(grown)], logits

    @torch.inference_mode()
    def score(
        self, rows: Sequence[SequenceCache], held: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Scored]:
        """Log-likelihood of each row's targets after its held-back tokens, all fed through the row's own store."""
        lengths = [len(h) for h in held]
        ids = [[*h, *t[:-1]] for h, t in zip(held, targets, strict=True)]
        grown, run, logits_BLV = self._forward(rows, ids, every=True)
        out = []
        for b, (first, target) in enumerate(zip(lengths, targets, strict=True)):
            logits_LV = logits_BLV[b, first - 1 : first - 1 + len(target)].float()
            wanted = torch.tensor(list(target), device=logits_LV.device)
            logp_L = logits_LV.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            greedy = bool((logits_LV.argmax(-1) == wanted).all())
            fine = bool(sound(logits_LV).all())
            out.append(Scored(tuple(logp_L.tolist()), greedy, grown[b].settled(run, b), grown[b].bytes().total, fine))
        return out

    @torch.inference_mode()
    def read(
        self,
        rows: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
    ) -> Step:
        """Feed each row its own chunk and keep all logits: one step of a stream; batch: the rows' own, formed for this step."""
        grown, run, logits = self._forward(rows, ids, every=True, reference=reference, batch=batch)
        settled = _settled(rows, grown, run, batch)
        errors = [run.errors[i].double().cpu() for i in sorted(run.errors)]
        return Step(settled, logits, [row.bytes().total for row in grown], torch.stack(errors) if errors else torch.empty(0))

    @torch.inference_mode()
    def answer(self, asks: Sequence[Ask], views: int = 0) -> list[Answer]:
        """Greedy decoding of a wave in lockstep: held-back tokens first, then one token a step; finished rows leave.

        views: bytes that decoded copies of the stores may take between steps; they change no bit.
        """
        start = time.perf_counter()
        rows, feed = [ask.row for ask in asks], [list(ask.held) for ask in asks]
        out: list[list[int]] = [[] for _ in asks]
        peak, reasons, live = [row.bytes().total for row in rows], [""] * len(asks), list(range(len(asks)))
        touched = [0] * len(asks)
        batch = self.batch(views)
        while live:
            live = batch.form(live, rows, [len(ids) for ids in feed])
            before = [rows[i] for i in live]
            grown, run, logits = self._forward(before, [feed[i] for i in live], batch=batch)
            settled = _settled(before, grown, run, batch)
            fine = sound(logits).tolist()
            for b, (i, token) in enumerate(zip(live, logits.argmax(-1).tolist(), strict=True)):
                peak[i] = max(peak[i], grown[b].bytes().total)  # a store may shrink while it grows: watched, not assumed
                reasons[i] = self._take(asks[i], out[i], token) if fine[b] else "unsound"
                touched[i] = rows[i].touched() if reasons[i] else 0
                rows[i], feed[i] = settled[b], [token]
            live = [i for i in live if not reasons[i]]
        seconds = time.perf_counter() - start
        every = zip(out, reasons, rows, peak, touched, strict=True)
        return [Answer(tuple(o), r, row, p, seconds, t) for o, r, row, p, t in every]

    def batch(self, views: int = 0) -> Batch:
        """Sequences to be fed in lockstep, with so many bytes for decoded copies of their stores."""
        return Batch(self.shape, self.groups, self.model.dtype, views)

    def begin(
        self,
        rows: Sequence[SequenceCache],
        lengths: Sequence[int],
        needs: Sequence[Needs] | None = None,
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
    ) -> Forward:
        """What attention must know to feed rows so many new tokens each; needs: what to record instead of what they ask for."""
        return Forward(
            shape=self.shape,
            groups=self.groups,
            stores=[row.slots for row in rows],
            seen=[row.seen for row in rows],
            lengths=lengths,
            needs=needs or [row.needs for row in rows],
            kv_dtype=self.kv_dtype,
            ropes=self.ropes,
            starts=[row.next_position for row in rows],
            unrotated=[row.unrotated for row in rows],
            teams=None if batch is None else batch.teams,
            reference=reference,
        )

    def _take(self, ask: Ask, out: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        out.append(token)
        if ask.stop(out):
            return "stop"
        return "length" if len(out) >= ask.max_new else ""

    def _forward(
        self,
        rows: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        needs: Sequence[Needs] | None = None,
        *,
        every: bool = False,
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
        alone: bool = False,
    ) -> tuple[list[SequenceCache], Forward, Tensor]:
        """One forward: rows with the new tokens appended, what it recorded, and logits [B, V], or [B, L, V] for `every`.

        alone: nothing ever shares this forward.
        """
        lengths = [len(one) for one in ids]
        starts = [row.next_position for row in rows]
        self.check_length(max(start + n for start, n in zip(starts, lengths, strict=True)))
        # Shorter rows are padded on the right: causal attention never sees those tokens, and nothing of them is stored.
        width, device = max(lengths), self.model.device
        ids_BL = torch.tensor([[*one, *[0] * (width - len(one))] for one in ids], device=device)
        # Padding repeats the last position: a model with learned positions has none beyond its limit.
        steps_BL = torch.arange(width, device=device).minimum(torch.tensor(lengths, device=device)[:, None] - 1)
        positions_BL = torch.tensor(starts, device=device)[:, None] + steps_BL
        last = sorted({n - 1 for n in lengths})
        run = self.begin(rows, lengths, needs, reference, batch)
        token = CURRENT.set(run)
        try:
            cache = EntryCache(len(self.shape.layers), self.kv_dtype)
            wanted = slice(None) if every else torch.tensor(last, device=device)
            with held(self.rotary, [row.length for row in rows]), tiles(self.invariant and not alone):
                logits = forward(self.model, ids_BL, positions_BL, cache, wanted)
        finally:
            CURRENT.reset(token)
        assert sorted(run.stats) == list(range(len(self.shape.layers))), "a layer did not reach our attention"
        if not every:
            where = torch.tensor([last.index(n - 1) for n in lengths], device=device)
            logits = logits[torch.arange(len(rows), device=device), where]
        return [row.after(run, b) for b, row in enumerate(rows)], run, logits


def _settled(
    before: Sequence[SequenceCache], grown: Sequence[SequenceCache], run: Forward, batch: Batch | None
) -> list[SequenceCache]:
    """Rows back at their budgets after a forward, the views of their batch brought up to date."""
    choices = [row.choices(run, b) for b, row in enumerate(grown)]
    if batch is not None:
        batch.follow(run, before, grown, choices)
    return [row.evicted(choice) for row, choice in zip(grown, choices, strict=True)]
