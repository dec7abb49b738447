"""Head groups: KV heads that hold equally many tokens and are stored together.

Immutable: every method returns a new head group that shares unchanged tensors, so copying a cache is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harness.kv.shared.folded import Folded
from harness.kv.shared.spread import Spread
from harness.kv.token_store import TokenStore, own
from harness.stages.encoded import Heads, TokenIndex
from harness.stages.protocols import Stats
from harness.stages.share.sharing import Bases
from harness.stages.transfers import numbers, places
from harness.types import KV


@dataclass(frozen=True)
class HeadGroup:
    """Keys and values of H KV heads with N tokens each: all heads of some layers, or single heads of one layer.

    pos_HN: int32 original positions; None (nothing is stored) while the tokens are contiguous up to the newest.
    sums_HN: fp32 column sums, for scorers and merges that keep their state. merge_H: fp32, a number that a merge keeps.
    times: heads of the model that read each head. bases: of layers whose heads are aligned or folded, in the cache dtype.
    folded: whether the keys are rotated parts of all heads' keys, and the values latents of the rest (`shared.folded`).
    """

    heads: Heads
    keys: TokenStore
    values: TokenStore
    pos_HN: Tensor | None = None
    sums_HN: Tensor | None = None
    merge_H: Tensor | None = None
    times: int = 1
    bases: Mapping[int, Bases] = field(default_factory=dict)
    folded: bool = False

    @cached_property
    def n(self) -> int:
        """Tokens per head."""
        return self.keys.n

    @cached_property
    def plain(self) -> torch.dtype | None:
        """The dtype of keys and values that are read as they lie in their chunks; None where reading changes them."""
        plain = self.times == 1 and not self.folded and self.keys.plain and self.values.plain
        return self.keys.tail_HND.dtype if plain else None

    @cached_property
    def by_layer(self) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Keys and values of each layer of a plain group as they lie in their chunks, views [1, H, n, D]."""
        layers = len(self.heads.layers)
        sides = ([chunk.tokens_by_layer(layers) for chunk in x.chunks] for x in (self.keys, self.values))
        keys, values = (zip(*side, strict=True) for side in sides)
        return list(zip(keys, values, strict=True))

    def slot(self, layer: int) -> slice:
        """The heads of a layer, as a slice of this group's H heads."""
        at = self.heads.layers.index(layer) * self.heads.each
        return slice(at, at + self.heads.each)

    def append(self, new: KV, sums_HN: Tensor | None) -> HeadGroup:
        """Add L new tokens of these heads; sums_HN [H, N + L]: column sums of this forward, if recorded."""
        pos, sums = self.pos_HN, self.sums_HN
        if pos is not None:
            pos = torch.cat((pos, places(new.start, new.n, pos.device).expand(len(pos), -1)), 1)
        if sums is not None:
            assert sums_HN is not None
            sums = torch.nn.functional.pad(sums, (0, new.n)) + sums_HN
        keys, values = self.keys.append(new.k_HND, self.heads), self.values.append(new.v_HND, self.heads)
        return HeadGroup(self.heads, keys, values, pos, sums, self.merge_H, self.times, self.bases, self.folded)

    def with_sums(self, stats: Sequence[Stats]) -> HeadGroup:
        """With the column sums of the context (None for sliding layers); stats: by layer."""
        return replace(self, sums_HN=Stats.join([stats[layer] for layer in self.heads.layers]).column_sums_HN)

    def positions(self, seen: int) -> Tensor:
        """Original positions, int32 [H, N]; that of the newest token is seen - 1."""
        if self.pos_HN is not None:
            return self.pos_HN
        contiguous = torch.arange(seen - self.n, seen, dtype=torch.int32, device=self.keys.tail_HND.device)
        return contiguous.expand(self.heads.n, self.n)

    def take(
        self,
        index_HM: Tensor,
        seen: int,
        layers: tuple[int, ...] | None = None,
        head: int | None = None,
        ends: tuple[int, int] = (0, 0),
    ) -> HeadGroup:
        """Copy the tokens index_HM (int64 [H, M]) with their positions and sums, of all heads or some.

        layers: only the heads of these layers. head: only this KV head of a single layer, counted from the group's first.
        ends: how many first and newest tokens are known to be among them.
        """
        layers = layers or self.heads.layers
        chosen = TokenIndex(index_HM, self._some(layers, head, index_HM.device), *ends)
        start, stop = self.heads.start, self.heads.stop
        heads = Heads(layers, start, stop) if head is None else Heads(layers, start + head, start + head + 1)
        pos = chosen.of(self.positions(seen))
        sums = None if self.sums_HN is None else chosen.of(self.sums_HN)
        bases = {layer: self.bases[layer] for layer in layers if layer in self.bases}
        keys, values = self.keys.take(index_HM, chosen), self.values.take(index_HM, chosen)
        merge = None if self.merge_H is None else chosen.of_heads(self.merge_H)
        return HeadGroup(heads, keys, values, pos, sums, merge, self.times, bases, self.folded)

    def _some(self, layers: tuple[int, ...], head: int | None, device: torch.device) -> Tensor | None:
        if layers == self.heads.layers and head is None:
            return None
        starts = [self.slot(layer).start for layer in layers]
        return numbers(tuple(at + h for at in starts for h in (range(self.heads.each) if head is None else [head])), device)

    def rest(self, layers: tuple[int, ...]) -> HeadGroup:
        """All tokens of some of the layers, copied; itself if these are all its layers."""
        if layers == self.heads.layers:
            return self
        h = len(layers) * self.heads.each
        every = torch.arange(self.n, device=self.keys.tail_HND.device).expand(h, -1)
        kept = self.take(every, self.n, layers, ends=(self.n, self.n))
        return kept if self.pos_HN is not None else replace(kept, pos_HN=None)

    def without_state(self) -> HeadGroup:
        """The same without what only evictions need."""
        return replace(self, sums_HN=None, merge_H=None)

    def owned(self) -> HeadGroup:
        """The same in storages that no other head group shares."""
        pos, sums, merge = (None if x is None else own(x) for x in (self.pos_HN, self.sums_HN, self.merge_H))
        return replace(self, keys=self.keys.owned(), values=self.values.owned(), pos_HN=pos, sums_HN=sums, merge_H=merge)

    def newest(self, n: int) -> HeadGroup:
        """The last n tokens, for sliding-window layers; needs contiguous tokens and exact codecs."""

        def cut(store: TokenStore) -> TokenStore:
            x_HND = store.exact()
            return TokenStore.of(x_HND[:, x_HND.shape[1] - n :].clone(), store.codec, None)

        return self if self.n <= n else replace(self, keys=cut(self.keys), values=cut(self.values))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of all tensors."""
        yield from self.keys.tensors()
        yield from self.values.tensors()
        if self.pos_HN is not None:
            yield "positions", self.pos_HN
        if self.sums_HN is not None:
            yield "state", self.sums_HN
        if self.merge_H is not None:
            yield "state", self.merge_H
        for bases in self.bases.values():
            yield from (("metadata", basis) for basis in bases)


class Slot(NamedTuple):
    """Where some heads of one layer are stored: their head group, and the slice of its heads."""

    head_group: HeadGroup
    at: slice

    @property
    def heads(self) -> slice:
        """The heads of the model that read this."""
        heads, times = self.head_group.heads, self.head_group.times
        return slice(heads.start * times, heads.stop * times)

    @property
    def held(self) -> list[int]:
        """Tokens of each of these heads."""
        return [self.head_group.n] * (self.heads.stop - self.heads.start)

    def positions(self, seen: int) -> Tensor:
        """Original positions of their tokens, [H, N]."""
        return self.head_group.positions(seen)[self.at].repeat_interleave(self.head_group.times, 0)

    def as_stored(self, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """Keys and values as views [1, H, n, D], one after another; None where reading them in `dtype` may change them."""
        group = self.head_group
        if group.plain is None or (group.plain != dtype and torch.promote_types(group.plain, dtype) != dtype):
            return None
        return group.by_layer[int(self.at.start) // group.heads.each]

    @property
    def keys(self) -> Spread:
        """The stored keys, as those heads read them."""
        return self._read(values=False)

    @property
    def values(self) -> Spread:
        """The stored values, as those heads read them."""
        return self._read(values=True)

    def _read(self, *, values: bool) -> Spread:
        group, bases = self.head_group, self._bases
        if group.folded:
            return Folded(group.keys, group.times, latent=group.values, bases=bases, values=values)
        return Spread(group.values if values else group.keys, group.times, bases and bases[values])

    @property
    def _bases(self) -> Bases | None:
        heads = self.head_group.heads
        return self.head_group.bases.get(heads.layers[self.at.start // heads.each])


def with_new(slots: Sequence[Slot], new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that R rows store in one layer, followed by the new ones, [R, H, N + L, D], in the dtype of those."""
    if not slots or not slots[0].head_group.n:
        return new_k, new_v
    if len(slots) == 1 and (stored := slots[0].as_stored(new_k.dtype)) is not None:
        k, v = stored
        return torch.cat((*k, new_k), 2), torch.cat((*v, new_v), 2)
    keys, values = [(slot.keys, slot.at) for slot in slots], [(slot.values, slot.at) for slot in slots]
    return _decoded(keys, new_k), _decoded(values, new_v)


def _decoded(stored: list[tuple[Spread, slice]], new_RHLD: Tensor) -> Tensor:
    """Stored rows and the new ones behind them, written once."""
    (r, h, length, d), n = new_RHLD.shape, stored[0][0].n
    out = new_RHLD.new_empty(r, h, n + length, d)
    for (side, at), one in zip(stored, out, strict=True):
        side.write_to(one[:, :n], at)
    out[:, :, n:] = new_RHLD
    return out
