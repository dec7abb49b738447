"""One batch row's cache over all layers: append after a forward, compress between forwards. It knows no model and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.kv.attention import Forward
from harness.kv.head_group import HeadGroup, Slot, of_heads
from harness.kv.memory import Budget, codec_info, measure, solve_budget, storage, touched
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.token_store import TokenStore, own
from harness.kv.view import part_view
from harness.stages.encoded import Heads
from harness.stages.keep import Choice
from harness.stages.protocols import Needs, Stats
from harness.stages.stack import Stack
from harness.types import KV, Bytes

PART_ELEMENTS = 1 << 26  # most key elements of one part when it is made: encoding needs a few fp32 copies of it


@dataclass(frozen=True)
class SequenceCache:
    """The stored parts, the tokens seen, and the rows a layer and head may hold (None: no limit).

    Layers of one shape that hold as many rows lie in one part. reading: the context is not yet complete (phase chunked evicts
    only until then). evicted_at: tokens seen when rows were last evicted. unrotated: keys are stored without rotation.
    even: whether all layers were given as many rows when some were last evicted (None: none were).
    length: tokens of the whole text, prompt and answer, where the model's rotation depends on it; else None.
    """

    shape: ModelShape
    stack: Stack
    parts: tuple[HeadGroup, ...]
    seen: int
    budget: int | None = None
    seed: int = 0
    ropes: tuple[LayerRope | None, ...] = ()
    reading: bool = False
    evicted_at: int = 0
    even: bool | None = None
    length: int | None = None

    @classmethod
    def empty(
        cls,
        shape: ModelShape,
        stack: Stack | None = None,
        budget: int | None = None,
        seed: int = 0,
        ropes: tuple[LayerRope | None, ...] = (),
    ) -> SequenceCache:
        """A row that has seen nothing; under a stack (its budget already solved) it compresses from the first token on."""
        return cls(shape, stack or Stack(), (), 0, budget, seed, ropes, reading=True)

    @cached_property
    def slots(self) -> dict[int, tuple[Slot, ...]]:
        """For each layer the parts that store its heads, in their order."""
        found: dict[int, tuple[Slot, ...]] = {}
        for part in self.parts:
            for layer in part.heads.layers:
                found[layer] = (*found.get(layer, ()), Slot(part, part.slot(layer)))
        return found

    @property
    def unrotated(self) -> bool:
        """Whether keys wait to be rotated to their place in the cache."""
        return self.stack.positions == "cache"

    @property
    def next_position(self) -> int:
        """Position at which the next token is fed: as many as were seen, or the next place in the cache."""
        if not (self.unrotated and self.parts and self.shape.full_layers):
            return self.seen
        return self.slots[self.shape.full_layers[0]][0].part.n

    def _window(self, part: HeadGroup) -> int | None:
        """The sliding window of a part's layers."""
        return self.shape.layers[part.heads.layers[0]].window

    @property
    def needs(self) -> Needs:
        """Statistics to record in the next forward."""
        return self.stack.needs if self._evicts else Needs()

    @property
    def _evicts(self) -> bool:
        return self.stack.evicts_steps or (self.stack.phase == "chunked" and self.reading)

    def after(self, run: Forward, row: int) -> SequenceCache:
        """This row with the new tokens of a forward appended; nothing is evicted yet."""
        new = [self._new(run, g, row) for g in range(len(run.groups))]
        parts: list[HeadGroup] = []
        if self.parts:
            for part in self.parts:
                g, _ = run.places[part.heads.layers[0]]
                parts.append(part.append(of_heads(new[g], part.heads, run.groups[g]), self._sums(run, part.heads, row)))
        else:
            for group, kv in zip(run.groups, new, strict=True):
                parts += self._first(run, group, kv, row)
        slid = (self._window(part) for part in parts)
        parts = [part if w is None else part.newest(w - 1) for part, w in zip(parts, slid, strict=True)]
        return replace(self, parts=tuple(parts), seen=self.seen + run.lengths[row])

    def _new(self, run: Forward, group: int, row: int) -> KV:
        """The row's new K and V of a group of layers, [layers * H, L, D], as they are stored."""
        k, v = map(own, run.rows(group, row))
        if self.unrotated:
            rope = self.ropes[run.groups[group][0]]
            assert rope is not None
            k = rope.unrotate(k, torch.arange(run.start(row), run.start(row) + k.shape[1], device=k.device))
        pos = torch.arange(self.seen, self.seen + k.shape[1], dtype=torch.int32, device=k.device).expand(k.shape[0], -1)
        return KV(k, v, pos)

    def _first(self, run: Forward, group: tuple[int, ...], kv: KV, row: int) -> list[HeadGroup]:
        """New parts of a group's layers, each of a bounded size, over tensors that hold nothing else."""
        k, v = kv.k_HND, kv.v_HND
        heads, window = self.shape.layers[group[0]].heads, self.shape.layers[group[0]].window
        stack = self.stack if window is None else Stack()
        view = run.dtype if stack.read == "cached" else None
        many = max(1, PART_ELEMENTS // max(1, k[:heads].numel()))  # layers in a part
        parts = []
        for at in range(0, len(group), many):
            chosen = Heads(group[at : at + many], 0, heads)
            here = slice(at * heads, at * heads + chosen.n)
            sides = (TokenStore.of(x[here], codec, view, chosen) for x, codec in ((k, stack.keys), (v, stack.values)))
            keeps = self._evicts and stack.keep is not None and stack.keep.scorer.keeps_state
            sums = self._sums(run, chosen, row) if keeps else None
            parts.append(HeadGroup(chosen, next(sides), next(sides), None, sums))
        return parts

    def _sums(self, run: Forward, heads: Heads, row: int) -> Tensor | None:
        sums = Stats.join([run.stats[layer][row] for layer in heads.layers]).column_sums_HN
        return None if sums is None else own(sums)  # those of a batch are summed in one tensor

    def settled(self, run: Forward, row: int) -> SequenceCache:
        """This row back at its budget, if its phase evicts after this forward."""
        return self.evicted(self.choices(run, row))

    def choices(self, run: Forward, row: int) -> list[Choice] | None:
        """What stays after this forward; None where the phase evicts nothing then."""
        if not self._evicts or self.seen - self.evicted_at < self.stack.every:
            return None
        return self._choose({i: run.stats[i][row] for i in self.shape.full_layers}, rotated=not self.unrotated)

    def read(self) -> SequenceCache:
        """This row at the end of its context: what only reading the context needed is dropped."""
        if not self.reading or self.stack.evicts_steps:
            return replace(self, reading=False)
        return replace(self, reading=False, parts=tuple(replace(part, sums_HN=None) for part in self.parts))

    def compress(
        self, stack: Stack, stats: Sequence[Stats], seed: int, dtype: torch.dtype, solved: Budget | None = None
    ) -> SequenceCache:
        """This exact row under a stack: all layers at once, after the context. `dtype` is that of a decoded view.

        stats: those of every layer. solved: the budget, where it is known. UserError when it is too small for this context.
        """
        budget = solved.tokens if solved else solve_budget(stack, self.shape, self.seen, self.itemsize)
        out = replace(self, stack=stack, budget=budget, seed=seed, reading=False)
        if not stack.compresses:
            return out
        if stack.keeps_state:
            out = replace(out, parts=tuple(part.with_sums(stats) for part in self.parts))
        if budget is not None:
            out = out.evicted(out._choose(dict(enumerate(stats)), rotated=True))
        return replace(out, parts=tuple(out._encoded(part, dtype) for part in out.parts))

    def _encoded(self, part: HeadGroup, dtype: torch.dtype) -> HeadGroup:
        """The exact rows of a part as the stack stores them; sliding layers keep their own rule, but for the rotation."""
        window = self._window(part)
        stack = self.stack if window is None else Stack()
        view = dtype if stack.read == "cached" else None
        k, v = part.keys.exact(), part.values.exact()
        if self.unrotated:
            rope, pos = self.ropes[part.heads.layers[0]], part.positions(self.seen)
            assert rope is not None
            k = rope.unrotate(k, pos[0] if part.pos_HN is None else pos)
        keys, values = (TokenStore.of(x, codec, view, part.heads) for x, codec in ((k, stack.keys), (v, stack.values)))
        return replace(part, keys=keys, values=values)

    def _choose(self, stats: dict[int, Stats], *, rotated: bool) -> list[Choice]:
        """The budget's rows in every full layer; layers that hold no more than it have no choice."""
        keep, budget = self.stack.keep, self.budget
        assert keep is not None and budget is not None
        ropes = self.ropes or (None,) * len(self.shape.layers)
        views = [part_view(p, stats, self.seen, self.seed, ropes[p.heads.layers[0]], rotated=rotated) for p in self._compressed]
        return keep.choose(views, budget)

    def evicted(self, choices: Sequence[Choice] | None) -> SequenceCache:
        """This row with only what was chosen, in the layers that have a choice; itself where nothing was to be chosen."""
        if choices is None:
            return self
        parts: list[HeadGroup] = []
        for part in self.parts:
            left = list(part.heads.layers)
            for choice in choices:
                mine = tuple(layer for layer in choice.layers if layer in part.heads.layers)
                if mine:
                    parts.append(part.take(choice.index_HM, self.seen, mine, choice.head))
                    left = [layer for layer in left if layer not in mine]
            if left:
                parts.append(part.rest(tuple(left)))
        if not choices:
            return replace(self, evicted_at=self.seen)
        all_given = {layer for choice in choices for layer in choice.layers} == set(self.shape.full_layers)
        even = all_given and len({choice.share for choice in choices}) == 1
        # Parts may be slices of one tensor: now that they hold different rows, each must let go of the others'.
        return replace(self, parts=tuple(part.owned() for part in parts), evicted_at=self.seen, even=even)

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the cache dtype."""
        return self.parts[0].keys.tail_HND.element_size()

    def held(self) -> list[list[int]]:
        """Rows held, per layer and KV head."""
        return [[slot.part.n for slot in self.slots[i] for _ in range(slot.part.heads.each)] for i in sorted(self.slots)]

    @property
    def size(self) -> int:
        """Rows held, over all layers and KV heads."""
        return sum(part.n * part.heads.n for part in self.parts)

    def kept_positions(self) -> list[list[Tensor]]:
        """Original positions held, per layer and KV head."""
        places = {id(part): part.positions(self.seen) for part in self.parts}
        return [[p for slot in self.slots[i] for p in places[id(slot.part)][slot.at]] for i in sorted(self.slots)]

    def bytes(self) -> Bytes:
        """What this row alone holds, a prefix that it shares included."""
        return measure(kind_tensor for part in self.parts for kind_tensor in part.tensors())

    @property
    def _compressed(self) -> list[HeadGroup]:
        """The parts of layers that the stack acts on."""
        return [part for part in self.parts if self._window(part) is None]

    def touched(self) -> int:
        """Rows of full layers that were evicted or are stored otherwise than they were, over layers and KV heads."""
        return touched(self._compressed, self.seen)

    @property
    def storage(self) -> str:
        """Packed, or simulated where numbers changed and no byte was saved."""
        return storage(self._compressed)

    @property
    def layer_budget(self) -> str | None:
        """How rows were really divided over layers, and in brackets what was asked for where that was something else."""
        return self.stack.keep.divided(even=self.even is not False) if self.stack.keep else None

    def codec_info(self) -> dict[str, Any]:
        """What the record says of how keys and values are stored."""
        return codec_info(self.stack, self.parts)
