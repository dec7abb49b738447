"""Encoded keys or values: what a codec returns, and how it is concatenated, cut by heads and indexed by tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def _starts(heads: int, n: int, device: torch.device) -> Tensor:
    """Where the tokens of each head begin in a flat axis of all heads' tokens, [heads, 1]."""
    return torch.arange(heads, device=device)[:, None] * n


class TokenIndex:
    """Sorted indices index_HM of M tokens of each of H heads, applied to tensors [H', N, ...].

    An index may run over two tensors, an older and a newer one behind it. heads: which of a tensor's H' heads the H heads are;
    None for all. first, newest: how many first and newest tokens are known to be among the M of every head; looking would make
    the host wait. Applied as one index_select over (head, token), which copies whole vectors (faster than a gather).
    """

    def __init__(self, index_HM: Tensor, heads: Tensor | None = None, first: int = 0, newest: int = 0) -> None:
        self.index_HM, self.heads, self.first, self.newest = index_HM, heads, first, newest
        self._flat: dict[tuple[int, bool], Tensor] = {}

    def of(self, old: Tensor, new: Tensor | None = None) -> Tensor:
        """The chosen tokens of old [H', N, ...] and, behind it, new [H', L, ...], as a copy [H, M, ...].

        Fast if all new tokens are known to stay, as they mostly are.
        """
        if new is not None and new.shape[1] > self.newest:
            old, new = torch.cat((old, new), 1), None
        out = (
            old.flatten(0, 1)
            .index_select(0, self._flat_index(old.shape[1], beyond=new is not None))
            .view(*self.index_HM.shape, *old.shape[2:])
        )
        if new is not None:
            out[:, -new.shape[1] :] = self.of_heads(new)
        return out

    def of_heads(self, x: Tensor) -> Tensor:
        """The chosen heads of x [H', ...] with all their tokens; x itself if all are chosen."""
        return x if self.heads is None else x.index_select(0, self.heads)

    def _flat_index(self, n: int, beyond: bool) -> Tensor:
        key = (n, beyond)
        if key not in self._flat:
            index = self.index_HM.clamp(max=n - 1) if beyond else self.index_HM
            starts = _starts(len(index), n, index.device) if self.heads is None else self.heads[:, None] * n
            self._flat[key] = (index + starts).flatten()
        return self._flat[key]


@dataclass(frozen=True)
class Heads:
    """The KV heads of a tensor [H, ...]: heads start .. stop - 1 of each of these layers, layer by layer."""

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
    """n encoded tokens of H heads.

    payload, metadata: tensors [H, n or n / block, ...] by name: codes, and scales or minima.
    shared: constants of a head, [H, ...] without a token axis; counted once, as metadata.
    Of a joint codec a tensor's first axis may be that of layers; such tensors are cut between layers only.
    clipped: number of elements outside the code range, an int or a 0-d tensor.
    together: heads that can only be decoded together, cut in such sets. skip: of the first set, heads that are not asked for.
    """

    payload: Mapping[str, Tensor]
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    n: int = 0
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: Tensor | int = 0
    together: int = 1
    skip: int = 0

    @cached_property
    def _layers(self) -> dict[int, tuple[Tensor, ...]]:
        return {}

    def tokens_by_layer(self, layers: int) -> tuple[Tensor, ...]:
        """Exact tokens of so many layers as views [1, H, n, D], one for each layer; cut once for all steps."""
        if layers not in self._layers:
            self._layers[layers] = self.payload["tokens"][None].chunk(layers, 1)
        return self._layers[layers]

    def cat(self, other: Encoded) -> Encoded:
        """This chunk and a newer one of the same heads, concatenated along the tokens."""
        payload = {k: torch.cat((t, other.payload[k]), 1) for k, t in self.payload.items()}
        metadata = {k: torch.cat((t, other.metadata[k]), 1) for k, t in self.metadata.items()}
        n, clipped = self.n + other.n, self.clipped + other.clipped
        return Encoded(payload, metadata, n, self.shared, clipped, self.together, self.skip)

    def heads(self, start: int, stop: int) -> Encoded:
        """Views of the heads [start, stop), with all that are encoded together with them."""
        every = max(len(t) for t in self.payload.values())
        start, stop, s = start + self.skip, stop + self.skip, self.together
        first, last = start // s * s, -(-stop // s) * s

        def cut(t: Tensor) -> Tensor:
            each = every // len(t)  # heads of a layer, where the first axis is that of layers
            return t[first // each : -(-last // each)]

        payload, metadata, shared = (
            {k: cut(t) for k, t in group.items()} for group in (self.payload, self.metadata, self.shared)
        )
        return Encoded(payload, metadata, self.n, shared, self.clipped, s, start - first)

    def newest(self, n: int) -> Encoded:
        """Views of the last n tokens, n a multiple of the block."""
        payload, metadata = (
            {k: t[:, t.shape[1] - t.shape[1] * n // self.n :] for k, t in group.items()}
            for group in (self.payload, self.metadata)
        )
        return replace(self, payload=payload, metadata=metadata, n=n)

    @staticmethod
    def stack(chunks: Sequence[Encoded]) -> Encoded:
        """Chunks of equally many tokens, concatenated along the heads."""
        if len(chunks) == 1:
            return chunks[0]
        first = chunks[0]
        return replace(
            first,
            payload={k: torch.cat([c.payload[k] for c in chunks]) for k in first.payload},
            metadata={k: torch.cat([c.metadata[k] for c in chunks]) for k in first.metadata},
            shared={k: torch.cat([c.shared[k] for c in chunks]) for k in first.shared},
            clipped=sum((c.clipped for c in chunks), start=0),
        )

    def take(self, chosen: TokenIndex, newer: Encoded | None = None) -> Encoded:
        """Copy the chosen tokens of this chunk and a newer one (codecs with block == 1 only)."""
        return replace(
            self,
            payload={k: chosen.of(t, newer.payload[k] if newer else None) for k, t in self.payload.items()},
            metadata={k: chosen.of(t, newer.metadata[k] if newer else None) for k, t in self.metadata.items()},
            n=int(chosen.index_HM.shape[1]),
            shared={k: chosen.of_heads(t) for k, t in self.shared.items()},
            clipped=self.clipped + newer.clipped if newer else self.clipped,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """The same with `change` applied to all tensors of payload and metadata."""
        payload, metadata = ({k: change(t) for k, t in group.items()} for group in (self.payload, self.metadata))
        return replace(self, payload=payload, metadata=metadata)

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [*self.payload.values(), *self.metadata.values(), *self.shared.values()]
