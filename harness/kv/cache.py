"""One batch row's cache over all layers: append after a forward, compress between forwards. It knows no model and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.kv.attention import Forward
from harness.kv.layer import LayerStore, Part, Side
from harness.kv.memory import measure, predict
from harness.kv.shape import ModelShape
from harness.stages.protocols import LayerView, Stats
from harness.stages.stack import Stack
from harness.types import KV, Bytes


@dataclass(frozen=True)
class Row:
    """The stores of all layers, the tokens seen, and the rows a layer and head may hold (None: no limit)."""

    shape: ModelShape
    stack: Stack
    layers: tuple[LayerStore, ...]
    seen: int
    budget: int | None = None
    seed: int = 0

    @classmethod
    def empty(cls, shape: ModelShape, stack: Stack | None = None, budget: int | None = None, seed: int = 0) -> Row:
        """A row that has seen nothing; under a stack (its budget already solved) it compresses from the first token on."""
        return cls(shape, stack or Stack(), ((),) * len(shape.layers), 0, budget, seed)

    def after(self, run: Forward, row: int) -> Row:
        """This row with the new tokens of a forward appended; nothing is evicted yet."""
        layers = []
        for i in range(len(self.layers)):
            grown = self._append(i, run.new[i][row], run.stats[i][row])
            window = self.shape.layers[i].window
            layers.append(grown if window is None else (grown[0].newest(window - 1),))
        return replace(self, layers=tuple(layers), seen=self.seen + run.lengths[row])

    def settled(self, run: Forward, row: int) -> Row:
        """This row back at its budget, if its phase evicts after every forward."""
        if not self.stack.evicts_steps:
            return self
        return self._evict([run.stats[i][row] for i in range(len(self.layers))])

    def _append(self, i: int, new: KV, stats: Sequence[Stats]) -> LayerStore:
        if self.layers[i]:
            return tuple(part.append(new, s.column_sums_HN) for part, s in zip(self.layers[i], stats, strict=True))
        compressed = self.shape.layers[i].window is None
        stack = self.stack if compressed else Stack()
        view = new.k_HND.dtype if stack.read == "cached" else None
        keys, values = Side.of(new.k_HND, stack.keys, view), Side.of(new.v_HND, stack.values, view)
        sums = stats[0].column_sums_HN if stack.keeps_state else None
        return (Part(0, new.k_HND.shape[0], keys, values, None, sums),)

    def compress(self, stack: Stack, stats: Sequence[Stats], seed: int, dtype: torch.dtype) -> Row:
        """This exact row under a stack: all layers at once, after the context. `dtype` is that of a decoded view.

        Raises UserError when the stack's budget is too small for this context.
        """
        budget = stack.budget(self.seen, lambda n: predict(stack, self.shape, n, self.itemsize, self.seen))
        out = replace(self, stack=stack, budget=budget, seed=seed)
        if not stack.compresses:
            return out
        full = set(self.shape.full_layers)
        if stack.keeps_state:
            out = replace(out, layers=tuple(_with_sums(store, s) for store, s in zip(self.layers, stats, strict=True)))
        if budget is not None:
            out = out._evict([[s] for s in stats])
        view = dtype if stack.read == "cached" else None
        encoded = [_encode(store, stack, view) if i in full else store for i, store in enumerate(out.layers)]
        return replace(out, layers=tuple(encoded))

    def _evict(self, stats: Sequence[Sequence[Stats]]) -> Row:
        """Keep the budget's rows in every full layer; layers that hold no more than it are left alone."""
        keep, budget = self.stack.keep, self.budget
        assert keep is not None and budget is not None
        chosen = self.shape.full_layers
        views = [self._view(i, stats[i]) for i in chosen]
        layers = list(self.layers)
        for i, index in zip(chosen, keep.select(views, budget), strict=True):
            if index is not None:
                layers[i] = _take(self.layers[i], index, self.seen)
        return replace(self, layers=tuple(layers))

    def _view(self, i: int, stats: Sequence[Stats]) -> LayerView:
        """Layer i as its scorer sees it: decoded rows, and sums carried in the store if any."""
        part = self.layers[i][0]
        sums = part.sums_HN if part.sums_HN is not None else stats[0].column_sums_HN
        return LayerView(
            layer=i,
            seen=self.seen,
            pos_HN=part.positions(self.seen),
            stats=Stats(sums, stats[0].queries_QWD, stats[0].scaling),
            read_keys=lambda: part.keys.read(torch.float32),
            read_values=lambda: part.values.read(torch.float32),
            seed=self.seed,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the cache dtype."""
        return next(part.keys.tail_HND.element_size() for store in self.layers for part in store)

    def held(self) -> list[list[int]]:
        """Rows held, per layer and KV head."""
        return [[part.n for part in store for _ in range(part.start, part.stop)] for store in self.layers]

    @property
    def size(self) -> int:
        """Rows held, over all layers and KV heads."""
        return sum(part.n * (part.stop - part.start) for store in self.layers for part in store)

    def kept_positions(self) -> list[list[Tensor]]:
        """Original positions held, per layer and KV head."""
        return [[p for part in store for p in part.positions(self.seen)] for store in self.layers]

    def bytes(self) -> Bytes:
        """What this row alone holds, a prefix that it shares included."""
        return measure(kind_tensor for store in self.layers for part in store for kind_tensor in part.tensors())

    def touched(self) -> int:
        """Rows of full layers that were evicted or are stored inexactly, over layers and KV heads."""
        total = 0
        for i in self.shape.full_layers:
            for part in self.layers[i]:
                inexact = max(s.n_encoded if s.codec.lossy else 0 for s in (part.keys, part.values))
                total += (part.stop - part.start) * (self.seen - part.n + inexact)
        return total

    def codec_info(self) -> dict[str, Any]:
        """What the record says of how keys and values are stored."""
        return {"keys": self.stack.keys.info(), "values": self.stack.values.info()}


def _with_sums(store: LayerStore, stats: Stats) -> LayerStore:
    """Hand the column sums of the context to the store, for scorers whose state lives on (a sliding layer has none)."""
    return tuple(replace(part, sums_HN=stats.column_sums_HN) for part in store)


def _encode(store: LayerStore, stack: Stack, view: torch.dtype | None) -> LayerStore:
    def side(old: Side, codec: Any) -> Side:
        return Side.of(old.exact(), codec, view)

    return tuple(replace(p, keys=side(p.keys, stack.keys), values=side(p.values, stack.values)) for p in store)


def _take(store: LayerStore, index: list[Tensor], seen: int) -> LayerStore:
    """The chosen rows: one part while all heads keep as many rows, else one part a head."""
    if len(index) == 1:
        return (store[0].take(index[0], seen),)
    return tuple(store[0].head(h).take(one, seen) for h, one in enumerate(index))
