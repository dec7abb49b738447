"""The shape of a model's KV cache, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: KV heads, head dims of keys and values, sliding window (None: full attention).

    unmerged: of two layers that store one direction for both, the share of tokens that are also kept whole.
    """

    heads: int
    d_key: int
    d_value: int
    window: int | None = None
    unmerged: Fraction | None = None

    def held(self, seen: int) -> int:
        """Tokens per head in an uncompressed cache after `seen` tokens; of a window the next query sees window - 1 old ones."""
        return seen if self.window is None else min(seen, self.window - 1)

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's exact K and V, all heads."""
        return self.heads * (self.d_key + self.d_value) * itemsize


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model, and its number of query heads."""

    layers: tuple[LayerShape, ...]
    query_heads: int

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention: those that stacks compress. Sliding-window layers keep their window, exact."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.window is None)

    def groups(self, *marks: Sequence[object]) -> tuple[tuple[int, ...], ...]:
        """Layers grouped by shape and by marks (lists with one entry a layer, such as devices): a group shares one tensor."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            alike.setdefault((layer, *(mark[i] for mark in marks)), []).append(i)
        return tuple(map(tuple, alike.values()))

    def full_bytes(self, seen: int, itemsize: int) -> int:
        """Bytes of the uncompressed cache after `seen` tokens."""
        return sum(layer.held(seen) * layer.token_bytes(itemsize) for layer in self.layers)
