"""A model prepared for our stores: its shape, its rotation, and what it refuses. Nothing is fed here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.tiles import TILE, in_tiles, prepare, tiles
from harness.errors import UserError
from harness.kv.attending.latent_cache import LatentCache
from harness.kv.attending.seat import Seat
from harness.kv.attention import NAME
from harness.kv.batch_views import Batch
from harness.kv.compat import EntryCache, forward, layer_devices, shape_of
from harness.kv.families.latent_entry import latents_of
from harness.kv.families.own_attention import adapt
from harness.kv.families.position_tables import placed, position_table
from harness.kv.families.states import Entrance
from harness.kv.forward import CURRENT, Forward
from harness.kv.honoured import no_gradients, no_moments, unsupported
from harness.kv.memory import Budget, solve_budget
from harness.kv.positions import held, learned_positions, moving_rotary
from harness.kv.rope import ropes_of
from harness.kv.rope_check import checked_ropes
from harness.kv.sequence_cache import SequenceCache
from harness.kv.shape import places_of
from harness.kv.shared.share_layout import Layout
from harness.models import activations, expert_tiles
from harness.models.placement import clock, input_device
from harness.stages.protocols import Needs
from harness.stages.stack import Stack

AS_IT_IS = nullcontext()


class PreparedModel:
    """A decoder that can be fed through our stores, and what it cannot do.

    The model must be loaded with attn_implementation="kv_harness". kv_dtype: K and V are rounded to it once, on entry.
    invariant: a request's logits are the same bits whatever shares its batch; the prefill of a context is always alone.
    """

    def __init__(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, eos: Sequence[int] = (), *, invariant: bool = False
    ) -> None:
        assert model.config.get_text_config(decoder=True)._attn_implementation == NAME
        self.model, self.kv_dtype, self.eos, self.invariant = model, kv_dtype, frozenset(eos), invariant
        adapt(model)
        if invariant:
            prepare(model)
            expert_tiles.prepare(model, in_tiles, TILE)
            activations.prepare(model, in_tiles)
        self.shape = shape_of(model.config)
        numbers, n = (
            self.shape.of_model(range(len(self.shape.layers))),
            model.config.get_text_config(decoder=True).num_hidden_layers,
        )
        self.latents, self.seats = latents_of(model, self.shape), dict[torch.nn.Module, Seat]()
        entry = LatentCache if self.latents else EntryCache
        self.entrance = Entrance(model, n, hybrid=self.shape.hybrid, entry=entry)
        places = layer_devices(model, n)
        devices = [places[i] for i in numbers]
        self.device = input_device(model)  # of token ids
        self.devices = tuple(dict.fromkeys((self.device, *places)))
        ropes, moves = ropes_of(model, n)
        ropes, odd = checked_ropes(
            model,
            self.shape,
            self.shape.groups(devices),
            tuple(ropes[i] for i in numbers),
            self.entrance.open([None]),
            self.latents,
        )
        self.ropes, self.rope_moves = ropes, moves or odd
        self.groups = self.shape.groups(devices, self.ropes)
        self.table, self.rotary = learned_positions(model), moving_rotary(model)
        self.placed_table = position_table(model)
        if self.shape.hybrid:
            self.shape = replace(self.shape, constant=self._state_bytes())

    @torch.inference_mode()
    def _state_bytes(self) -> int:
        """Bytes of a sequence's states, measured after a token of no meaning."""
        run, cache = self.begin([SequenceCache.empty(self.shape)], [1]), self.entrance.open([None])
        token = CURRENT.set(run)
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            forward(self.model, ids, ids, cache, [0])
        finally:
            CURRENT.reset(token)
        found = sum(x.numel() * x.element_size() for x in self.entrance.close(cache, 1)[0].held)
        if found == 0:
            raise unsupported("its recurrent states are not in its cache")
        return found

    def start(
        self,
        stack: Stack = Stack(),  # noqa: B008 frozen
        total: int = 0,
        seed: int = 0,
        length: int = 0,
        solved: Budget | None = None,
    ) -> SequenceCache:
        """A cache that has seen nothing and compresses from its first token on.

        A fraction or byte budget is solved for `total` tokens. `length` tokens will be fed in all, `total` where it is not
        given. solved: the budget, where it is known. UserError when a budget is too small, or the model lacks what the stack or
        so many tokens need.
        """
        self.check(stack)
        self.check_length(length or total)
        budget = solved.tokens if solved else solve_budget(stack, self.shape, total, self.kv_dtype.itemsize)
        cache = replace(SequenceCache.empty(self.shape, stack, budget, seed), ropes=self.ropes, latents=self.latents)
        return cache if self.rotary is None else replace(cache, length=length or total)

    def check_length(self, tokens: int) -> None:
        """Refuse (UserError) more tokens than a learned position table has places for."""
        if self.table is not None and tokens > self.table:
            raise UserError(
                f"{tokens} tokens are beyond this model's positions: its learned table has {self.table}, and nothing follows it"
            )

    def check(self, stack: Stack) -> None:
        """Refuse (UserError) a stack that the model's positions do not allow."""
        kind = self.model.config.model_type
        if stack.unrotated and None in self.ropes:
            asked, legal = ("positions='cache'", "positions=original") if stack.rope == "post" else ("rope='pre'", "rope=post")
            raise UserError(
                f"compress.{asked} is not possible with model type {kind!r}: it has no rotary positions that can be "
                f"rotated back; legal is {legal}"
            )
        if stack.keys.needs and any(self.latents):
            raise UserError(
                f"compress.keys={stack.keys.name} is not possible with model type {kind!r}: it compares queries with keys, and "
                "this model stores latents; legal are codecs that look at what is stored alone"
            )
        for role, codec in (("keys", stack.keys), ("values", stack.values)):
            fitting = getattr(codec, "fitting", None)
            if fitting is not None and fitting.weights == "fisher" and (why := no_gradients(self.shape)):
                raise UserError(
                    f"compress.{role}.weights='fisher' is not possible with model type {kind!r}: {why}, and gradients of "
                    "keys and values are needed; legal is weights=plain"
                )
        if stack.needs.query_moments and self.rope_moves:
            raise UserError(f"a scorer that predicts queries is not possible with model type {kind!r}: its rotation moves")
        if stack.needs.query_moments and (why := no_moments(self.model)):
            raise UserError(f"a scorer that predicts queries is not possible with model type {kind!r}: {why}")
        if stack.share is not None and stack.share.folds and None in self.ropes:
            raise UserError(
                f"compress.share={type(stack.share).__name__} is not possible with model type {kind!r}: it has no rotary "
                "positions that can be rotated back, and part of its keys would lose theirs; legal are other shares"
            )
        layout, places = Layout.of(stack.share, self.shape, bases=False), places_of(self.groups)
        for layers in layout.together:
            if len({places[layer][0] for layer in layers}) > 1:
                raise UserError(
                    f"compress.share={type(stack.share).__name__} is not possible with this model: layers {layers[0]} and "
                    f"{layers[1]} differ in their rotation or device; legal are shares of heads"
                )

    def clock(self) -> float:
        """Seconds of a clock, read once its devices have done all that they were asked for: at the ends of what is timed."""
        return clock(self.devices)

    def batch(self, views: int = 0) -> Batch:
        """Sequences to be fed in lockstep, with so many bytes for decoded copies of their stores.

        Rows that are fed alone have none.
        """
        alone = self.shape.hybrid and self.invariant
        return Batch(self.shape, self.groups, self.model.dtype, 0 if alone else views)

    def begin(
        self,
        caches: Sequence[SequenceCache],
        lengths: Sequence[int],
        needs: Sequence[Needs] | None = None,
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
    ) -> Forward:
        """What attention must know to feed so many new tokens each; needs: what to record instead of what they ask for."""
        return Forward(
            shape=self.shape,
            groups=self.groups,
            stores=[cache.slots for cache in caches],
            seen=[cache.seen for cache in caches],
            lengths=lengths,
            needs=needs or [cache.needs for cache in caches],
            kv_dtype=self.kv_dtype,
            ropes=self.ropes,
            starts=[cache.next_position for cache in caches],
            unrotated=[cache.unrotated for cache in caches],
            by_index=[cache.by_index for cache in caches],
            by_row=self.invariant,
            teams=None if batch is None else batch.teams,
            reference=reference,
            latents=self.latents,
            seats=self.seats,
        )

    def around(
        self, caches: Sequence[SequenceCache], positions_BL: Tensor, *, invariant: bool
    ) -> AbstractContextManager[object]:
        """What must hold while the model runs: each sequence's own rotation and rows of a position table, products in tiles."""
        if self.rotary is None and self.placed_table is None and not invariant:
            return AS_IT_IS
        with ExitStack() as stack:
            stack.enter_context(held(self.rotary, [cache.length for cache in caches]))
            stack.enter_context(placed(self.placed_table, positions_BL))
            stack.enter_context(tiles(invariant))
            return stack.pop_all()
