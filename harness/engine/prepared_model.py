"""A model prepared for our stores: its shape, its rotation, and what it refuses. Nothing is fed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from harness.engine.tiles import prepare
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.kv.batch_views import Batch
from harness.kv.compat import layer_devices, shape_of
from harness.kv.forward import Forward
from harness.kv.memory import Budget, solve_budget
from harness.kv.positions import learned_positions, moving_rotary
from harness.kv.rope import ropes_of
from harness.kv.rope_check import checked_ropes
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


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
        self.packed = prepare(model) if invariant else 0  # bytes of copied weights
        self.shape = shape_of(model.config)
        n = len(self.shape.layers)
        devices = layer_devices(model, n)
        self.ropes, self.rope_moves = checked_ropes(model, self.shape, self.shape.groups(devices), *ropes_of(model, n))
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
        """A cache that has seen nothing and compresses from its first token on.

        A fraction or byte budget is solved for `total` tokens. `length` tokens will be fed in all, `total` where it is not
        given. solved: the budget, where it is known. UserError when a budget is too small, or the model lacks what the stack or
        so many tokens need.
        """
        self.check(stack)
        self.check_length(length or total)
        budget = solved.tokens if solved else solve_budget(stack, self.shape, total, self.kv_dtype.itemsize)
        cache = SequenceCache.empty(self.shape, stack, budget, seed, self.ropes)
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
        if stack.positions == "cache" and None in self.ropes:
            raise UserError(
                f"compress.positions='cache' is not possible with model type {kind!r}: it has no rotary positions that can be "
                "rotated back; legal is positions=original"
            )
        if stack.needs.query_moments and self.rope_moves:
            raise UserError(f"a scorer that predicts queries is not possible with model type {kind!r}: its rotation moves")

    def batch(self, views: int = 0) -> Batch:
        """Sequences to be fed in lockstep, with so many bytes for decoded copies of their stores."""
        return Batch(self.shape, self.groups, self.model.dtype, views)

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
            teams=None if batch is None else batch.teams,
            reference=reference,
        )
