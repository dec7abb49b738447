"""What one row of a batch stores for some heads of some layers: encoded rows, exact tail, positions, scores.

It knows no model and no policy.

Stores are never changed in place: every method returns a new store that shares what it did not touch, so forks are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.kv.token_store import TokenStore, own
from harness.stages.encoded import Heads, TokenIndex
from harness.stages.protocols import Stats
from harness.types import KV


@dataclass(frozen=True)
class HeadGroup:
    """Rows of some KV heads that hold the same number of rows: all heads of some layers, or single heads of one.

    pos_HN: int32 original positions, None while the rows are contiguous up to the newest token (then nothing is stored).
    sums_HN: fp32 column sums, for scorers whose state lives on.
    """

    heads: Heads
    keys: TokenStore
    values: TokenStore
    pos_HN: Tensor | None = None
    sums_HN: Tensor | None = None

    @property
    def n(self) -> int:
        return self.keys.n

    def slot(self, layer: int) -> slice:
        """Where a layer's heads stand among this part's."""
        at = self.heads.layers.index(layer) * self.heads.each
        return slice(at, at + self.heads.each)

    def append(self, new: KV, sums_HN: Tensor | None) -> HeadGroup:
        """Add new rows of these heads; sums_HN [H, N + L] are this forward's attention sums, if recorded."""
        pos, sums = self.pos_HN, self.sums_HN
        if pos is not None:
            pos = torch.cat((pos, new.pos_HN), 1)
        if sums is not None:
            assert sums_HN is not None
            sums = torch.nn.functional.pad(sums, (0, new.n)) + sums_HN
        keys, values = self.keys.append(new.k_HND, self.heads), self.values.append(new.v_HND, self.heads)
        return HeadGroup(self.heads, keys, values, pos, sums)

    def with_sums(self, stats: Sequence[Stats]) -> HeadGroup:
        """With the column sums of the context, for scorers whose state lives on (a sliding layer has none)."""
        return replace(self, sums_HN=Stats.join([stats[layer] for layer in self.heads.layers]).column_sums_HN)

    def positions(self, seen: int) -> Tensor:
        """int32 [H, N] original positions; the newest row stands at seen - 1."""
        if self.pos_HN is not None:
            return self.pos_HN
        contiguous = torch.arange(seen - self.n, seen, dtype=torch.int32, device=self.keys.tail_HND.device)
        return contiguous.expand(self.heads.n, self.n)

    def take(self, index_HM: Tensor, seen: int, layers: tuple[int, ...] | None = None, head: int | None = None) -> HeadGroup:
        """Copy the rows index_HM (int64 [H, M]) and their positions and sums, of all heads or of some.

        layers: only these; head: only this KV head (counted from the part's first) of a single layer.
        """
        layers = layers or self.heads.layers
        rows = TokenIndex(index_HM, self._some(layers, head, index_HM.device))
        start, stop = self.heads.start, self.heads.stop
        heads = Heads(layers, start, stop) if head is None else Heads(layers, start + head, start + head + 1)
        pos = rows.of(self.positions(seen))
        sums = None if self.sums_HN is None else rows.of(self.sums_HN)
        return HeadGroup(heads, self.keys.take(index_HM, rows), self.values.take(index_HM, rows), pos, sums)

    def _some(self, layers: tuple[int, ...], head: int | None, device: torch.device) -> Tensor | None:
        if layers == self.heads.layers and head is None:
            return None
        starts = [self.slot(layer).start for layer in layers]
        chosen = [at + h for at in starts for h in (range(self.heads.each) if head is None else [head])]
        return torch.tensor(chosen, device=device)

    def rest(self, layers: tuple[int, ...]) -> HeadGroup:
        """All rows of some of the layers, copied."""
        if layers == self.heads.layers:
            return self
        h = len(layers) * self.heads.each
        every = torch.arange(self.n, device=self.keys.tail_HND.device).expand(h, -1)
        kept = self.take(every, self.n, layers)
        return kept if self.pos_HN is not None else replace(kept, pos_HN=None)

    def owned(self) -> HeadGroup:
        """The same in storages that hold nothing of other parts."""
        pos, sums = (None if x is None else own(x) for x in (self.pos_HN, self.sums_HN))
        return HeadGroup(self.heads, self.keys.owned(), self.values.owned(), pos, sums)

    def newest(self, n: int) -> HeadGroup:
        """The last n rows of a contiguous part with exact codecs: what sliding-window layers hold on to."""

        def cut(side: TokenStore) -> TokenStore:
            rows = side.exact()
            return TokenStore.of(rows[:, rows.shape[1] - n :].clone(), side.codec, None)

        return self if self.n <= n else replace(self, keys=cut(self.keys), values=cut(self.values))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of everything held."""
        yield from self.keys.tensors()
        yield from self.values.tensors()
        if self.pos_HN is not None:
            yield "positions", self.pos_HN
        if self.sums_HN is not None:
            yield "state", self.sums_HN


class Slot(NamedTuple):
    """Some heads of one layer: the part that stores them, and where they stand in it."""

    head_group: HeadGroup
    at: slice


def of_heads(new: KV, heads: Heads, group: tuple[int, ...]) -> KV:
    """The rows of some heads out of those of a whole group of layers."""
    each = len(new.k_HND) // len(group)
    if heads.layers == group and heads.each == each:
        return new
    index = [group.index(layer) * each + h for layer in heads.layers for h in range(heads.start, heads.stop)]
    chosen = torch.tensor(index, device=new.k_HND.device)
    k, v, pos = (x.index_select(0, chosen) for x in (new.k_HND, new.v_HND, new.pos_HN))
    return KV(k, v, pos)
