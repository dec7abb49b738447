"""One exact prefill, many stacks, in lockstep: everything here is token ids.

A batch is a list of sequence caches, one per request. Projections and MLPs are shared matrix products; attention reads each
one's own store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.answers import Answer, Ask, Prefix, Scored, Step, inputs
from harness.engine.logits import likeliest, padded, scored
from harness.engine.prepared_model import PreparedModel
from harness.kv.batch_views import Batch, settled
from harness.kv.compat import forward
from harness.kv.families.states import fed_together
from harness.kv.forward import CURRENT, Forward
from harness.kv.memory import Budget
from harness.kv.sequence_cache import SequenceCache
from harness.models.company import same_in_company
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from harness.stages.transfers import fetched, numbers


class Engine(PreparedModel):
    """Runs a decoder on token ids through our stores.

    invariant: whether that was asked for and holds for this model. A hybrid's sequences are fed alone; others are tried.
    """

    def __init__(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, eos: Sequence[int] = (), *, invariant: bool = False
    ) -> None:
        super().__init__(model, kv_dtype, eos, invariant=invariant)
        if invariant and not self.shape.hybrid and self.device.type != "meta":
            vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
            self.invariant = same_in_company(self, vocabulary)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], needs: Needs = Needs(), length: int = 0) -> Prefix:  # noqa: B008 frozen
        """Read a context exactly, in one forward, recording what `needs` asks for.

        `length`: tokens that will be fed in all, those of an answer included; as many as these where it is not given.
        """
        start = self.clock()
        empty = [self.start(length=length or len(ids))]
        run = self.begin(empty, [len(ids)], [needs])
        cache, _ = self._feed(run, empty, [ids], invariant=False)  # nothing ever shares it: its products need no tiles
        stats = tuple(run.stats[i][0] for i in range(len(self.shape.layers)))
        return Prefix(cache[0], stats, self.clock() - start)

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
            for i, one, after in zip(live, grown, settled(grown, run), strict=True):
                peak[i], caches[i] = max(peak[i], one.bytes().total), after
        return [(cache.read(), p) for cache, p in zip(caches, peak, strict=True)]

    @torch.inference_mode()
    def feed(self, caches: Sequence[SequenceCache], ids: Sequence[Sequence[int]]) -> tuple[list[SequenceCache], Tensor]:
        """Feed each cache its own tokens (numbers may differ); returns the caches afterwards and the last logits [B, V]."""
        grown, run, logits = self._forward(caches, ids)
        return settled(grown, run), logits

    @torch.inference_mode()
    def score(
        self, caches: Sequence[SequenceCache], held: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Scored]:
        """Log-likelihood of each cache's targets after its held-back tokens, all fed through the cache's own store."""
        lengths = [len(h) for h in held]
        ids = [[*h, *t[:-1]] for h, t in zip(held, targets, strict=True)]
        grown, run, logits_BLV = self._forward(caches, ids, every=True)
        rows = [
            logits_BLV[b, first - 1 : first - 1 + len(t)] for b, (first, t) in enumerate(zip(lengths, targets, strict=True))
        ]
        marks = scored(rows, targets)
        peaks, after = [cache.bytes().total for cache in grown], settled(grown, run)
        return [
            Scored(one.logp, all(one.top), row, peak, all(one.sound))
            for one, row, peak in zip(marks, after, peaks, strict=True)
        ]

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
        members = [*range(len(caches)), *(b for _, b in beside)]
        grown += [cache.after(run, b) for cache, b in beside]
        rows = settled(grown, run, caches, batch, members)
        errors = fetched([run.errors[i] for i in sorted(run.errors)])
        summed = torch.stack(errors).double() if errors else torch.empty(0)  # on the host: not every device has float64
        return Step(rows, logits, [cache.bytes().total for cache in grown], summed[:, members] if errors else summed, members)

    @torch.inference_mode()
    def answer(self, asks: Sequence[Ask], views: int = 0) -> list[Answer]:
        """Greedy decoding of a batch in lockstep: held-back tokens first, then one token a step; who has finished leaves.

        views: bytes that decoded copies of the stores may take between steps; they change no bit.
        """
        start = self.clock()
        caches, feed = [ask.row for ask in asks], [list(ask.held) for ask in asks]
        out: list[list[int]] = [[] for _ in asks]
        peak, reasons, live = [cache.bytes().total for cache in caches], [""] * len(asks), list(range(len(asks)))
        touched = [0] * len(asks)
        batch = self.batch(views)
        while live:
            live = batch.form(live, caches, [len(ids) for ids in feed])
            before = [caches[i] for i in live]
            grown, run, logits = self._forward(before, [feed[i] for i in live], batch=batch)
            after = settled(grown, run, before, batch)
            tokens: list[int] = likeliest(logits).tolist()
            for b, (i, token) in enumerate(zip(live, tokens, strict=True)):
                peak[i] = max(peak[i], grown[b].bytes().total)  # a store may shrink while it grows: watched, not assumed
                reasons[i] = self._take(asks[i], out[i], token) if token >= 0 else "unsound"
                touched[i] = caches[i].touched() if reasons[i] else 0
                caches[i], feed[i] = after[b], [token]
            live = [i for i in live if not reasons[i]]
        seconds = self.clock() - start
        every = zip(out, reasons, caches, peak, touched, strict=True)
        return [Answer(tuple(o), r, cache, p, seconds, t) for o, r, cache, p, t in every]

    def _take(self, ask: Ask, out: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        out.append(token)
        return ask.ended(out)

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
        grown, logits = self._feed(run, caches, ids, every=every, invariant=self.invariant)
        return grown, run, logits

    def _feed(
        self,
        run: Forward,
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        invariant: bool,
    ) -> tuple[list[SequenceCache], Tensor]:
        """The same for a forward that was begun; a hybrid's rows in several forwards of the model where they must be."""
        self.check_length(max(run.start(b) + n for b, n in enumerate(run.lengths)))
        if not self.shape.hybrid:
            return self._fed(run, caches, ids, every=every, invariant=invariant)
        # A hybrid's own kernels sum in another order for another number of rows: alone, a row needs no tiles.
        together = fed_together(run.lengths, [cache.states for cache in caches], run.reference, alone=self.invariant)
        if len(together) == 1:
            return self._fed(run, caches, ids, every=every)
        return self._apart(run, together, caches, ids, every=every)

    def _apart(
        self,
        run: Forward,
        together: Sequence[Sequence[int]],
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        *,
        every: bool,
    ) -> tuple[list[SequenceCache], Tensor]:
        """The same in a forward for each of these groups of rows."""
        grown, logits = dict[int, SequenceCache](), dict[int, Tensor]()
        outputs = dict[int, dict[int, Tensor]]()
        for rows in together:
            part = run.part(rows, outputs)
            fed, found = self._fed(part, [caches[b] for b in rows], [ids[b] for b in rows], every=every)
            grown |= dict(zip(rows, fed, strict=True))
            logits |= dict(zip(rows, found, strict=True))
            if part.outputs is not None:
                outputs[rows[0]] = part.outputs
            run.join(rows, part)
        return [grown[b] for b in range(len(caches))], padded([logits[b] for b in range(len(caches))])

    def _fed(
        self,
        run: Forward,
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        *,
        every: bool,
        invariant: bool = False,
    ) -> tuple[list[SequenceCache], Tensor]:
        """One forward of the model, its products in tiles where they must be invariant."""
        ids_BL, positions_BL = inputs(ids, [run.start(b) for b in range(len(caches))], self.device)
        last = sorted({n - 1 for n in run.lengths})
        token = CURRENT.set(run)
        try:
            cache = self.entrance.open([cache.states for cache in caches])
            wanted = slice(None) if every else last
            with self.around(caches, positions_BL, invariant=invariant):
                logits = forward(self.model, ids_BL, positions_BL, cache, wanted)
        finally:
            CURRENT.reset(token)
        assert len(run.stats) == len(self.shape.layers) and not run.handed, "a layer did not reach our attention"
        run.states = self.entrance.close(cache, len(caches))
        if not every and len(last) == 1:
            logits = logits[:, 0]
        elif not every:
            at = numbers(tuple(last.index(n - 1) for n in run.lengths), logits.device)
            logits = logits[torch.arange(len(caches), device=logits.device), at]
        return [cache.after(run, b) for b, cache in enumerate(caches)], logits
