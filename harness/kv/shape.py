"""The shape of a model's KV cache, layer by layer; it knows no tensors and no stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: KV heads, head dims of keys and values, and its sliding window (None: sees everything)."""

    heads: int
    d_key: int
    d_value: int
    window: int | None = None

    def held(self, seen: int) -> int:
        """Rows per head that an uncompressed cache holds after `seen` tokens: the next query sees window - 1 old rows."""
        return seen if self.window is None else min(seen, self.window - 1)

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's exact K and V, all heads."""
        return self.heads * (self.d_key + self.d_value) * itemsize


@dataclass(frozen=True)
class ModelShape:
    """All layers of a model, and its query heads."""

    layers: tuple[LayerShape, ...]
    query_heads: int

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that stacks compress; sliding-window layers keep their own rule."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.window is None)

    def groups(self, *marks: Sequence[object]) -> tuple[tuple[int, ...], ...]:
        """Layers of one shape whose marks (device, rotation: one of each for every layer) agree: they can lie in one tensor."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            alike.setdefault((layer, *(mark[i] for mark in marks)), []).append(i)
        return tuple(map(tuple, alike.values()))

    def full_bytes(self, seen: int, itemsize: int) -> int:
        """Bytes of the uncompressed cache after `seen` tokens."""
        return sum(layer.held(seen) * layer.token_bytes(itemsize) for layer in self.layers)
