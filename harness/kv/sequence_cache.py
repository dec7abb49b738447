"""The sequence cache: what one request holds over all layers. Tokens are added after a forward and evicted between forwards.

Immutable: every method returns a new cache that shares unchanged tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from harness.kv.families.latent import HOLDS, Latent, expanded
from harness.kv.families.states import States
from harness.kv.forward import Forward
from harness.kv.head_group import HeadGroup, Slot, head_group_view, of_heads
from harness.kv.memory import Budget, codec_info, measure, solve_budget, storage, touched
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.storing import first_groups, new_tokens, observing, recorded_sums, stored
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
    length: tokens of the whole text, prompt and answer, if the model's RoPE angles depend on it; else None.
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
    length: int | None = None
    states: States | None = None
    latents: tuple[Latent | None, ...] = ()

    @classmethod
    def empty(cls, shape: ModelShape, stack: Stack | None = None, budget: int | None = None, seed: int = 0) -> SequenceCache:
        """An empty cache; with a stack, whose budget is already solved, it compresses from the first token on."""
        return cls(shape, stack or Stack(), (), 0, budget, seed, reading=True)

    @cached_property
    def slots(self) -> dict[int, tuple[Slot, ...]]:
        """For each layer where its heads are stored, in the order of the heads."""
        found: dict[int, tuple[Slot, ...]] = {}
        for group in self.head_groups:
            for layer in group.heads.layers:
                found[layer] = (*found.get(layer, ()), Slot(group, group.slot(layer)))
        return found

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
        ropes = [self._unrotates(layers[0]) for layers in run.groups]
        new = [new_tokens(run, g, member, self.seen, rope) for g, rope in enumerate(ropes)]
        groups: list[HeadGroup] = []
        for group in self.head_groups:
            g, _ = run.places[group.heads.layers[0]]
            groups.append(group.append(of_heads(new[g], group.heads, run.groups[g]), recorded_sums(run, group.heads, member)))
        if not groups:
            keep = self.stack.keep
            sums = (run, member) if self._evicts and keep is not None and keep.scorer.keeps_state else None
            for layers, kv in zip(run.groups, new, strict=True):
                groups += first_groups(self.shape, self.stack, layers, kv, run.dtype, sums=sums)
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
        return self._choose({i: run.stats[i][member] for i in self.shape.full_layers}, turn)

    def read(self) -> SequenceCache:
        """This cache at the end of its context: scorer state that only phase chunked needed is dropped."""
        if not self.reading or self.stack.evicts_steps:
            return replace(self, reading=False)
        return replace(self, reading=False, head_groups=tuple(replace(group, sums_HN=None) for group in self.head_groups))

    def compress(
        self, stack: Stack, stats: Sequence[Stats], seed: int, dtype: torch.dtype, solved: Budget | None = None
    ) -> SequenceCache:
        """This exact cache compressed by a stack, all layers at once, after the context.

        stats: of every layer. dtype: of a decoded copy, for stacks that keep one. solved: the budget, where it is known.
        UserError if the budget is too small.
        """
        budget = solved.tokens if solved else solve_budget(stack, self.shape, self.seen, self.itemsize)
        out = replace(self, stack=stack, budget=budget, seed=seed, reading=False)
        if not stack.compresses:
            return out
        if stack.keeps_state:
            out = replace(out, head_groups=tuple(group.with_sums(stats) for group in self.head_groups))
        if budget is not None:
            choices = out._choose(dict(enumerate(stats)))
            check_finite(choices)
            out = out.evicted(choices)
        groups = (
            stored(group, self.shape, used, self.seen, out._unrotates(group.heads.layers[0]), dtype)
            for group in out.head_groups
            for used in [observing(stack, self.shape, group, stats)]
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
        groups: list[HeadGroup] = []
        for group in self.head_groups:
            left = list(group.heads.layers)
            for choice in choices:
                mine = tuple(layer for layer in choice.layers if layer in group.heads.layers)
                if mine:
                    groups.append(group.take(choice.index_HM, self.seen, mine, choice.head, choice.ends))
                    left = [layer for layer in left if layer not in mine]
            if left:
                groups.append(group.rest(tuple(left)))
        if not choices:
            return replace(self, evicted_at=self.seen)
        everywhere = {layer for choice in choices for layer in choice.layers} == set(self.shape.full_layers)
        even = everywhere and len({choice.share for choice in choices}) == 1
        # Head groups may be slices of one tensor: now each needs its own, so that evicted tokens free memory.
        return replace(self, head_groups=tuple(group.owned() for group in groups), evicted_at=self.seen, even=even)

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the cache dtype."""
        return self.head_groups[0].keys.tail_HND.element_size()

    def held(self) -> list[list[int]]:
        """Tokens held, per layer and KV head."""
        return [
            [slot.head_group.n for slot in self.slots[i] for _ in range(slot.head_group.heads.each)] for i in sorted(self.slots)
        ]

    @property
    def size(self) -> int:
        """Tokens held, summed over layers and KV heads."""
        return sum(group.n * group.heads.n for group in self.head_groups)

    def kept_positions(self) -> list[list[Tensor]]:
        """Original positions of the tokens held, per layer and KV head."""
        return [
            [p for slot in self.slots[i] for p in slot.head_group.positions(self.seen)[slot.at]] for i in sorted(self.slots)
        ]

    def bytes(self) -> Bytes:
        """Bytes of all its tensors, including those shared with other caches."""
        states = (("recurrent", x) for x in (self.states.held if self.states else ()))
        return measure(chain(states, *(group.tensors() for group in self.head_groups)))

    @property
    def _compressed(self) -> list[HeadGroup]:
        """The head groups of full layers, on which the stack acts."""
        return [group for group in self.head_groups if self._window(group) is None]

    def touched(self) -> int:
        """Tokens of full layers that were evicted or are not stored exactly, summed over layers and KV heads."""
        return touched(self._compressed, self.seen)

    @property
    def storage(self) -> str:
        """The record's `storage`: "simulated" if a codec changed numbers and saved no bytes, else "packed"."""
        return storage(self._compressed)

    @property
    def layer_budget(self) -> str | None:
        """The record's `layer_budget`: how the budget was divided over layers, and what was asked for if that differs."""
        return self.stack.keep.divided(even=self.even is not False) if self.stack.keep else None

    def codec_info(self) -> dict[str, Any]:
        """The record's `codec_info`: how keys and values are stored."""
        found = codec_info(self.stack, self.head_groups)
        if any(self.latents):
            for role, held in HOLDS.items():
                found[role]["holds"] = held
        return found
