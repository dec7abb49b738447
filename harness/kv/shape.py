"""The shape of a model's KV cache, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Expanded:
    """What attention reads of a layer that stores latents: heads, and head dims of keys and values."""

    heads: int
    d_key: int
    d_value: int


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: KV heads, head dims of keys and values, sliding window (None: full attention).

    chunked: the window starts anew at each multiple of it, so that a query sees the tokens of its own chunk only.
    expanded: of a layer that stores a latent, the keys and values that attention makes of it. Such a layer stores one head: as
    its key the rotated part that all heads share, as its value the latent itself.
    unmerged: of two layers that store one direction for both, the share of tokens that are also kept whole.
    """

    heads: int
    d_key: int
    d_value: int
    window: int | None = None
    chunked: bool = False
    expanded: Expanded | None = None
    unmerged: Fraction | None = None

    def held(self, seen: int) -> int:
        """Tokens per head in an uncompressed cache after `seen` tokens; of a window the next query sees window - 1 old ones."""
        return seen if self.window is None else min(seen, self.window - 1)

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's exact K and V, all heads."""
        return self.heads * (self.d_key + self.d_value) * itemsize

    @cached_property
    def attended(self) -> tuple[int, int, int]:
        """Heads, key dim and value dim of what attention reads."""
        read = self.expanded or self
        return read.heads, read.d_key, read.d_value

    def read_bytes(self, itemsize: int) -> int:
        """Bytes of one token decoded, and expanded where a latent is stored, while attention reads it."""
        heads, d_key, d_value = self.attended
        return self.token_bytes(itemsize) + (heads * (d_key + d_value) * itemsize if self.expanded else 0)


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model that attend, and its number of query heads.

    numbers: those of these layers in the model, where others lie between them; empty: 0, 1, ... hybrid: whether some layers,
    these or others, have recurrent or convolution states. constant: bytes of a sequence's states, 0 until they are measured.
    readers: layers that store nothing and attend to another's store: (number in the model, index in `layers` of the owner).
    """

    layers: tuple[LayerShape, ...]
    query_heads: int
    numbers: tuple[int, ...] = ()
    hybrid: bool = False
    constant: int = 0
    readers: tuple[tuple[int, int], ...] = ()

    @cached_property
    def owners(self) -> dict[int, int]:
        """For a layer without a store, by its number in the model, the index in `layers` of the one whose store it reads."""
        return dict(self.readers)

    @cached_property
    def places(self) -> dict[int, int]:
        """The index in `layers` of a layer by its number in the model."""
        return {number: at for at, number in enumerate(self.numbers or range(len(self.layers)))}

    def of_model(self, layers: Sequence[int]) -> list[int]:
        """The numbers in the model of some of `layers`."""
        return [self.numbers[i] for i in layers] if self.numbers else list(layers)

    @property
    def attending(self) -> list[int]:
        """The numbers in the model of all layers that attend, those without a store of their own among them."""
        return sorted([*self.places, *self.owners])

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
        """Bytes of the uncompressed cache after `seen` tokens, states included."""
        return self.constant + sum(layer.held(seen) * layer.token_bytes(itemsize) for layer in self.layers)

    def reach(self, seen: int, itemsize: int) -> float:
        """The share of `full_bytes` that stacks act on: layers with full attention. Windows and states stay as they are."""
        reached = sum(self.layers[i].token_bytes(itemsize) for i in self.full_layers) * seen
        return reached / max(self.full_bytes(seen, itemsize), 1)


@lru_cache
def places_of(groups: tuple[tuple[int, ...], ...]) -> Mapping[int, tuple[int, int]]:
    """For every layer, the group that it is in, and where it stands there."""
    return {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group)}
