"""One exact prefill, many stacks, in lockstep: everything here is token ids.

A batch is a list of sequence caches, one per request. Projections and MLPs are shared matrix products; attention reads each
one's own store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engine.answers import Answer, Ask, Prefix, Scored, Step
from harness.engine.logits import sound
from harness.engine.prepared_model import PreparedModel
from harness.engine.tiles import tiles
from harness.kv.batch_views import Batch
from harness.kv.compat import EntryCache, forward
from harness.kv.forward import CURRENT, Forward
from harness.kv.memory import Budget
from harness.kv.positions import held
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


class Engine(PreparedModel):
    """Runs a decoder on token ids through our stores."""

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], needs: Needs = Needs(), length: int = 0) -> Prefix:  # noqa: B008 frozen
        """Read a context exactly, in one forward, recording what `needs` asks for.

        `length`: tokens that will be fed in all, those of an answer included; as many as these where it is not given.
        """
        start = time.perf_counter()
        empty = [self.start(length=length or len(ids))]
        run = self.begin(empty, [len(ids)], [needs])
        cache, _ = self._feed(empty, [ids], run)  # nothing ever shares it: its products need no tiles
        stats = tuple(run.stats[i][0] for i in range(len(self.shape.layers)))
        return Prefix(cache[0], stats, time.perf_counter() - start)

    @torch.inference_mode()
    def compress(self, prefix: Prefix, stack: Stack, seed: int = 0, solved: Budget | None = None) -> SequenceCache:
        """The context under one stack; the prefix is not changed. UserError when the budget is too small for it.

        solved: the budget, where it is known.
        """
        self.check(stack)
        return prefix.row.compress(stack, prefix.stats, seed, self.model.dtype, solved)

    @torch.inference_mode()
    def read_chunked(self, ids: Sequence[int], caches: Sequence[SequenceCache]) -> list[tuple[SequenceCache, int]]:
        """Read a context into empty caches, each in chunks of its own stack; the caches afterwards and their largest bytes."""
        caches, peak = list(caches), [0] * len(caches)
        while live := [i for i, cache in enumerate(caches) if cache.seen < len(ids)]:
            chunks = [ids[caches[i].seen : caches[i].seen + caches[i].stack.chunk] for i in live]
            grown, run, _ = self._forward([caches[i] for i in live], chunks)
            for b, i in enumerate(live):
                peak[i], caches[i] = max(peak[i], grown[b].bytes().total), grown[b].settled(run, b)
        return [(cache.read(), p) for cache, p in zip(caches, peak, strict=True)]

    @torch.inference_mode()
    def feed(self, caches: Sequence[SequenceCache], ids: Sequence[Sequence[int]]) -> tuple[list[SequenceCache], Tensor]:
        """Feed each cache its own tokens (numbers may differ); returns the caches afterwards and the last logits [B, V]."""
        grown, run, logits = self._forward(caches, ids)
        return [cache.settled(run, b) for b, cache in enumerate(grown)], logits

    @torch.inference_mode()
    def score(
        self, caches: Sequence[SequenceCache], held: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Scored]:
        """Log-likelihood of each cache's targets after its held-back tokens, all fed through the cache's own store."""
        lengths = [len(h) for h in held]
        ids = [[*h, *t[:-1]] for h, t in zip(held, targets, strict=True)]
        grown, run, logits_BLV = self._forward(caches, ids, every=True)
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
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
        beside: Sequence[tuple[SequenceCache, int]] = (),
    ) -> Step:
        """Feed each cache its own chunk and keep all logits: one step of a stream; batch: formed for this step.

        beside: more caches, each with the number of one of `caches` that reads the same: exact ones of the same tokens. The
        step has them behind the others, with the numbers of whom they share a forward with.
        """
        needs = [cache.needs for cache in caches]
        for cache, b in beside:
            needs[b] = needs[b] | cache.needs
        grown, run, logits = self._forward(caches, ids, needs, every=True, reference=reference, batch=batch)
        settled = _settled(caches, grown, run, batch)
        more = [cache.after(run, b) for cache, b in beside]
        settled += [cache.settled(run, b) for cache, (_, b) in zip(more, beside, strict=True)]
        errors = [run.errors[i].double().cpu() for i in sorted(run.errors)]
        members = [*range(len(caches)), *(b for _, b in beside)]
        held = [cache.bytes().total for cache in (*grown, *more)]
        return Step(settled, logits, held, torch.stack(errors)[:, members] if errors else torch.empty(0), members)

    @torch.inference_mode()
    def answer(self, asks: Sequence[Ask], views: int = 0) -> list[Answer]:
        """Greedy decoding of a batch in lockstep: held-back tokens first, then one token a step; who has finished leaves.

        views: bytes that decoded copies of the stores may take between steps; they change no bit.
        """
        start = time.perf_counter()
        caches, feed = [ask.row for ask in asks], [list(ask.held) for ask in asks]
        out: list[list[int]] = [[] for _ in asks]
        peak, reasons, live = [cache.bytes().total for cache in caches], [""] * len(asks), list(range(len(asks)))
        touched = [0] * len(asks)
        batch = self.batch(views)
        while live:
            live = batch.form(live, caches, [len(ids) for ids in feed])
            before = [caches[i] for i in live]
            grown, run, logits = self._forward(before, [feed[i] for i in live], batch=batch)
            settled = _settled(before, grown, run, batch)
            fine = sound(logits).tolist()
            for b, (i, token) in enumerate(zip(live, logits.argmax(-1).tolist(), strict=True)):
                peak[i] = max(peak[i], grown[b].bytes().total)  # a store may shrink while it grows: watched, not assumed
                reasons[i] = self._take(asks[i], out[i], token) if fine[b] else "unsound"
                touched[i] = caches[i].touched() if reasons[i] else 0
                caches[i], feed[i] = settled[b], [token]
            live = [i for i in live if not reasons[i]]
        seconds = time.perf_counter() - start
        every = zip(out, reasons, caches, peak, touched, strict=True)
        return [Answer(tuple(o), r, cache, p, seconds, t) for o, r, cache, p, t in every]

    def _take(self, ask: Ask, out: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        out.append(token)
        if ask.stop(out):
            return "stop"
        return "length" if len(out) >= ask.max_new else ""

    def _forward(
        self,
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        needs: Sequence[Needs] | None = None,
        *,
        every: bool = False,
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
    ) -> tuple[list[SequenceCache], Forward, Tensor]:
        """One forward: caches with the new tokens appended, what it recorded, and logits [B, V], or [B, L, V] for `every`.

        needs: what to record, where it is not what the caches ask for.
        """
        run = self.begin(caches, [len(one) for one in ids], needs, reference, batch)
        with tiles(self.invariant):
            grown, logits = self._feed(caches, ids, run, every=every)
        return grown, run, logits

    def _feed(
        self, caches: Sequence[SequenceCache], ids: Sequence[Sequence[int]], run: Forward, *, every: bool = False
    ) -> tuple[list[SequenceCache], Tensor]:
        lengths = [len(one) for one in ids]
        starts = [cache.next_position for cache in caches]
        self.check_length(max(start + n for start, n in zip(starts, lengths, strict=True)))
        # Shorter ones are padded on the right: causal attention never sees those tokens, and nothing of them is stored.
        width, device = max(lengths), self.model.device
        ids_BL = torch.tensor([[*one, *[0] * (width - len(one))] for one in ids], device=device)
        # Padding repeats the last position: a model with learned positions has none beyond its limit.
        steps_BL = torch.arange(width, device=device).minimum(torch.tensor(lengths, device=device)[:, None] - 1)
        positions_BL = torch.tensor(starts, device=device)[:, None] + steps_BL
        last = sorted({n - 1 for n in lengths})
        token = CURRENT.set(run)
        try:
            cache = EntryCache(len(self.shape.layers))
            wanted = slice(None) if every else torch.tensor(last, device=device)
            with held(self.rotary, [cache.length for cache in caches]):
                logits = forward(self.model, ids_BL, positions_BL, cache, wanted)
        finally:
            CURRENT.reset(token)
        assert sorted(run.stats) == list(range(len(self.shape.layers))), "a layer did not reach our attention"
        if not every:
            where = torch.tensor([last.index(n - 1) for n in lengths], device=device)
            logits = logits[torch.arange(len(caches), device=device), where]
        return [cache.after(run, b) for b, cache in enumerate(caches)], logits


def _settled(
    before: Sequence[SequenceCache], grown: Sequence[SequenceCache], run: Forward, batch: Batch | None
) -> list[SequenceCache]:
    """Rows back at their budgets after a forward, the views of their batch brought up to date."""
    choices = [cache.choices(run, b) for b, cache in enumerate(grown)]
    if batch is not None:
        batch.follow(run, before, grown, choices)
    return [cache.evicted(choice) for cache, choice in zip(grown, choices, strict=True)]
