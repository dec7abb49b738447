"""Rows in stored form and the operations every storage shares: join, cut by heads, take rows. It knows no number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class TokenIndex:
    """Chosen rows of every head, sorted, as a flat index: whole rows are copied, which a gather over channels does not do.

    index_HM counts over an older tensor of rows and, after it, a newer one. heads: for each of the H heads that are kept, which
    of the tensor's heads it is; None when they are all of them.
    """

    def __init__(self, index_HM: Tensor, heads: Tensor | None = None) -> None:
        self.index_HM, self.heads = index_HM, heads
        self._flat: dict[int, Tensor] = {}
        self._whole: dict[tuple[int, int], bool] = {}

    def of(self, old: Tensor, new: Tensor | None = None) -> Tensor:
        """Copy of the rows of old [H, N, ...] and new [H, L, ...] as [H, M, ...]; mostly all of the new ones stay."""
        if new is not None and not self._keeps_all(old.shape[1], new.shape[1]):
            old, new = torch.cat((old, new), 1), None
        out = old.flatten(0, 1).index_select(0, self._flat_index(old.shape[1])).view(*self.index_HM.shape, *old.shape[2:])
        if new is not None:
            out[:, -new.shape[1] :] = self.of_heads(new)
        return out

    def of_heads(self, x: Tensor) -> Tensor:
        """The kept heads of x [H, ...], all their rows; x itself when they are all."""
        return x if self.heads is None else x.index_select(0, self.heads)

    def _flat_index(self, n: int) -> Tensor:
        if n not in self._flat:
            heads = self.heads if self.heads is not None else torch.arange(len(self.index_HM), device=self.index_HM.device)
            self._flat[n] = (self.index_HM.clamp(max=n - 1) + heads[:, None] * n).flatten()
        return self._flat[n]

    def _keeps_all(self, n: int, length: int) -> bool:
        """Whether every head keeps all `length` rows that follow the first n: then they need no index."""
        if (n, length) not in self._whole:
            first = self.index_HM[:, -length] if length <= self.index_HM.shape[1] else self.index_HM.new_full((1,), -1)
            self._whole[n, length] = bool((first == n).all())
        return self._whole[n, length]


@dataclass(frozen=True)
class Heads:
    """Which KV heads the rows of a tensor [H, ...] belong to: [start, stop) of every layer named, layer by layer."""

    layers: tuple[int, ...]
    start: int
    stop: int

    @property
    def each(self) -> int:
        """KV heads of one layer."""
        return self.stop - self.start

    @property
    def n(self) -> int:
        """H, over all layers."""
        return len(self.layers) * self.each


@dataclass(frozen=True)
class Encoded:
    """Rows in stored form: every tensor has KV heads first and tokens (or blocks of tokens) second.

    shared: constants of a head that all its rows share, heads first and no token axis; counted once, as metadata.
    clipped: elements that the code range could not hold, a number or a 0-d tensor.
    """

    payload: Mapping[str, Tensor]
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    n: int = 0  # rows
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: Tensor | int = 0

    def cat(self, other: Encoded) -> Encoded:
        """This and a newer chunk of the same heads."""
        return Encoded(
            {k: torch.cat((t, other.payload[k]), 1) for k, t in self.payload.items()},
            {k: torch.cat((t, other.metadata[k]), 1) for k, t in self.metadata.items()},
            self.n + other.n,
            self.shared,
            self.clipped + other.clipped,
        )

    def heads(self, start: int, stop: int) -> Encoded:
        """Views of the heads [start, stop)."""
        payload, metadata, shared = (
            {k: t[start:stop] for k, t in group.items()} for group in (self.payload, self.metadata, self.shared)
        )
        return Encoded(payload, metadata, self.n, shared, self.clipped)

    def newest(self, n: int) -> Encoded:
        """Views of the last n rows, whole blocks of them."""
        payload, metadata = (
            {k: t[:, t.shape[1] - t.shape[1] * n // self.n :] for k, t in group.items()}
            for group in (self.payload, self.metadata)
        )
        return Encoded(payload, metadata, n, self.shared, self.clipped)

    @staticmethod
    def stack(parts: Sequence[Encoded]) -> Encoded:
        """Chunks of as many rows, their heads one after another."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        return Encoded(
            {k: torch.cat([p.payload[k] for p in parts]) for k in first.payload},
            {k: torch.cat([p.metadata[k] for p in parts]) for k in first.metadata},
            first.n,
            {k: torch.cat([p.shared[k] for p in parts]) for k in first.shared},
            sum((p.clipped for p in parts), start=0),
        )

    def take(self, rows: TokenIndex, newer: Encoded | None = None) -> Encoded:
        """Copy rows of this and of a newer chunk (codecs with block == 1 only)."""
        return Encoded(
            {k: rows.of(t, newer.payload[k] if newer else None) for k, t in self.payload.items()},
            {k: rows.of(t, newer.metadata[k] if newer else None) for k, t in self.metadata.items()},
            int(rows.index_HM.shape[1]),
            {k: rows.of_heads(t) for k, t in self.shared.items()},
            self.clipped + newer.clipped if newer else self.clipped,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """The same with every tensor of rows changed."""
        payload, metadata = ({k: change(t) for k, t in group.items()} for group in (self.payload, self.metadata))
        return Encoded(payload, metadata, self.n, self.shared, self.clipped)

    def tensors(self) -> list[Tensor]:
        """Everything held."""
        return [*self.payload.values(), *self.metadata.values(), *self.shared.values()]
