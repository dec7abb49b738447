"""What one request holds over all layers, immutable: tokens are added after a forward and evicted between forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from harness.kv.evicting.group_view import head_group_view
from harness.kv.evicting.merging import after_eviction
from harness.kv.families.latent import HOLDS, Latent, expanded
from harness.kv.families.states import States
from harness.kv.forward import Forward
from harness.kv.head_group import HeadGroup, Slot
from harness.kv.memory import Budget, codec_info, measure, solve_budget, storage, touched
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.shared.share_layout import Layout
from harness.kv.storing import first_groups, new_tokens, observing, of_heads, recorded_sums, stored, whole_sets
from harness.stages.keep import Choice, check_finite
from harness.stages.protocols import Needs, Stats
from harness.stages.stack import Stack
from harness.types import Bytes


@dataclass(frozen=True)
class SequenceCache:
    """Head groups (layers of one shape that hold equally many tokens share one), and what the next eviction needs.

    seen: tokens fed so far. budget: tokens per layer and head (None: no limit). seed: of the example, for scorers.
    ropes: RoPE of each layer, None where there is none.
    reading: the context is not complete yet (phase chunked evicts only until then). evicted_at: `seen` at the last eviction.
    even: whether all layers had the same budget at the last eviction (None: no eviction yet).
    merged: evicted tokens that were merged into others so far, summed over layers and KV heads; an int or a 0-d tensor.
    length: tokens of the whole text, if the model's RoPE angles depend on it; else None. layout: under a share.
    states: recurrent and convolution states of a hybrid's layers; None before the first token.
    latents: how each layer's latents become keys and values, None where keys and values are stored; () if they are everywhere.
    """

    shape: ModelShape
    stack: Stack
    head_groups: tuple[HeadGroup, ...]
    seen: int
    budget: int | None = None
    seed: int = 0
    ropes: tuple[LayerRope | None, ...] = ()
    reading: bool = False
    evicted_at: int = 0
    even: bool | None = None
    merged: Tensor | int = 0
    length: int | None = None
    states: States | None = None
    latents: tuple[Latent | None, ...] = ()
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def empty(cls, shape: ModelShape, stack: Stack | None = None, budget: int | None = None, seed: int = 0) -> SequenceCache:
        """An empty cache; with a stack, whose budget is already solved, it compresses from the first token on."""
        layout = Layout.of(stack.share if stack else None, shape)
        return cls(shape, stack or Stack(), (), 0, budget, seed, reading=True, layout=layout)

    @cached_property
    def slots(self) -> dict[int, tuple[Slot, ...]]:
        """For each layer where its heads are stored, in the order of the heads; a layer may read the store of another."""
        return self.layout.slots(self.head_groups)

    @property
    def unrotated(self) -> bool:
        """Whether keys are stored without rotation, and rotated when they are read."""
        return self.stack.unrotated

    @property
    def by_index(self) -> bool:
        """Whether they are then rotated by their index in the cache; if not, by their original positions."""
        return self.stack.positions == "cache"

    @property
    def next_position(self) -> int:
        """Position of the next token: the number of tokens seen, or of tokens held (positions=cache)."""
        if not (self.by_index and self.head_groups and self.shape.full_layers):
            return self.seen
        return self.slots[self.shape.full_layers[0]][0].head_group.n

    def _window(self, group: HeadGroup) -> int | None:
        """The sliding window of a head group's layers."""
        return self.shape.layers[group.heads.layers[0]].window

    @property
    def needs(self) -> Needs:
        """Statistics to record in the next forward."""
        return self.stack.needs if self._evicts else Needs()

    @property
    def _evicts(self) -> bool:
        return self.stack.evicts_steps or (self.stack.phase == "chunked" and self.reading)

    def after(self, run: Forward, member: int) -> SequenceCache:
        """This cache with the new tokens of a forward added; nothing is evicted yet.

        member: which sequence of the batch this is, here and in the methods below.
        """
        new = []
        for g, layers in enumerate(run.groups):
            fresh = new_tokens(run, g, member, self.seen, self._unrotates(layers[0]))
            new.append(self.layout.entering(layers, fresh, self.ropes))
        groups: list[HeadGroup] = []
        for group in self.head_groups:
            layers, kv = new[run.places[group.heads.layers[0]][0]]
            recorded = self.layout.sums(recorded_sums(run, group.heads, member), layers[0])
            groups.append(group.append(of_heads(kv, group.heads, layers), recorded))
        if not groups:
            sums = (run, member) if self._evicts and self.stack.accumulates else None
            for layers, kv in new:
                groups += first_groups(self.layout, self.stack, layers, kv, run.dtype, sums=sums)
        windows = (self._window(group) for group in groups)
        groups = [group if w is None else group.newest(w - 1) for group, w in zip(groups, windows, strict=True)]
        seen = self.seen + run.lengths[member]
        return replace(self, head_groups=tuple(groups), seen=seen, states=run.states[member] if run.states else None)

    def _unrotates(self, layer: int) -> LayerRope | None:
        """The RoPE to undo before a layer's keys are stored; None if they are stored as they are."""
        if not self.unrotated:
            return None
        rope = self.ropes[layer]
        assert rope is not None
        return rope

    def choices(self, run: Forward, member: int) -> list[Choice] | None:
        """The tokens that stay after this forward; None if the phase does not evict now. `check_finite` is the caller's."""
        if not self._evicts or self.seen - self.evicted_at < self.stack.every:
            return None
        turn = self.stack.positions if self.unrotated else None
        return self._choose({i: self.layout.stats(i, run.stats[i][member]) for i in self.shape.full_layers}, turn)

    def read(self) -> SequenceCache:
        """This cache at the end of its context: scorer state that only phase chunked needed is dropped."""
        if not self.reading or self.stack.evicts_steps:
            return replace(self, reading=False)
        return replace(self, reading=False, head_groups=tuple(group.without_state() for group in self.head_groups))

    def compress(
        self, stack: Stack, stats: Sequence[Stats], seed: int, dtype: torch.dtype, solved: Budget | None = None
    ) -> SequenceCache:
        """This exact cache compressed by a stack, all layers at once, after the context.

        stats: of every layer. dtype: of a decoded copy, for stacks that keep one. solved: the budget, where it is known.
        UserError if the budget is too small.
        """
        budget = solved.tokens if solved else solve_budget(stack, self.shape, self.seen, self.itemsize)
        out = replace(self, stack=stack, budget=budget, seed=seed, reading=False, layout=Layout.of(stack.share, self.shape))
        if not stack.compresses:
            return out
        if stack.share is not None:
            stats = [out.layout.stats(i, one) for i, one in enumerate(stats)]
            out = replace(out, head_groups=out.layout.shared(self.head_groups, self.ropes))
        if stack.keeps_state or (stack.merges and stack.accumulates):
            out = replace(out, head_groups=tuple(group.with_sums(stats) for group in out.head_groups))
        if budget is not None:
            choices = out._choose(dict(enumerate(stats)))
            check_finite(choices)
            out = out.evicted(choices)
        exact = out.head_groups if stack.evicts_steps else [one.without_state() for one in out.head_groups]
        groups = (
            part
            for group in whole_sets(exact, stack, self.shape)
            for used in [observing(stack, self.shape, group, stats)]
            for part in stored(group, self.shape, used, self.seen, out._unrotates(group.heads.layers[0]), dtype)
        )
        return replace(out, head_groups=tuple(groups))

    def _choose(self, stats: dict[int, Stats], turn: str | None = None) -> list[Choice]:
        """The tokens that stay in every full layer; layers within their budget have no Choice. turn: see `head_group_view`."""
        keep, budget = self.stack.keep, self.budget
        assert keep is not None and budget is not None
        ropes = self.ropes or (None,) * len(self.shape.layers)
        views = [head_group_view(p, stats, self.seen, self.seed, ropes[p.heads.layers[0]], turn) for p in self._compressed]
        return keep.choose([expanded(view, self.latents) for view in views], budget)

    def evicted(self, choices: Sequence[Choice] | None) -> SequenceCache:
        """This cache with the chosen tokens only, in layers that have a Choice; itself if choices is None."""
        if choices is None:
            return self
        if not choices:
            return replace(self, evicted_at=self.seen)
        everywhere = {layer for choice in choices for layer in choice.layers} == set(self.layout.stores(self.shape.full_layers))
        even = everywhere and len({choice.share for choice in choices}) == 1
        # Head groups may be slices of one tensor: now each needs its own, so that evicted tokens free memory.
        groups, more = after_eviction(self.head_groups, choices, self.stack.merge, self.seed, self.seen)
        owned = tuple(group.owned() for group in groups)
        return replace(self, head_groups=owned, evicted_at=self.seen, even=even, merged=self.merged + more)

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the cache dtype."""
        return self.head_groups[0].keys.tail_HND.element_size()

    def held(self) -> list[list[int]]:
        """Tokens held, per layer and KV head, which may be in the store of another."""
        return [[n for slot in self.slots[i] for n in slot.held] for i in sorted(self.slots)]

    @property
    def size(self) -> int:
        """Tokens held, summed over layers and KV heads."""
        return sum(group.n * group.heads.n for group in self.head_groups)

    def kept_positions(self) -> list[list[Tensor]]:
        """Original positions of the tokens held, per layer and KV head."""
        return [[p for slot in self.slots[i] for p in slot.positions(self.seen)] for i in sorted(self.slots)]

    def bytes(self) -> Bytes:
        """Bytes of all its tensors, including those shared with other caches."""
        states = (("recurrent", x) for x in (self.states.held if self.states else ()))
        return measure(chain(states, *(group.tensors() for group in self.head_groups)))

    @property
    def _compressed(self) -> list[HeadGroup]:
        """The head groups of full layers, on which the stack acts."""
        return [group for group in self.head_groups if self._window(group) is None]

    def touched(self) -> int:
        """Tokens of full layers that were evicted or are not stored exactly, by themselves, summed over layers and KV heads."""
        return touched(self._compressed, self.seen, self.layout)

    @property
    def tokens_merged(self) -> int | None:
        """The record's `tokens_merged`; None for a stack that drops what goes."""
        return None if self.stack.merge is None else int(self.merged)

    @property
    def storage(self) -> str:
        """The record's `storage`, as `memory.storage` says it."""
        return storage(self._compressed)

    @property
    def layer_budget(self) -> str | None:
        """The record's `layer_budget`: how the budget was divided over layers, and what was asked for if that differs."""
        return self.stack.keep.divided(even=self.even is not False) if self.stack.keep else None

    def codec_info(self) -> dict[str, Any]:
        """The record's `codec_info`: how keys and values are stored."""
        found = codec_info(self.stack, self.head_groups, self.shape.full_layers)
        if any(self.latents):
            for role, held in HOLDS.items():
                found[role]["holds"] = held
        return found
