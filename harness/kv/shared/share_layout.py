"""How a stack's sharing divides the layers and heads of a model: what is stored of new tokens, and what is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.head_group import HeadGroup, Slot
from harness.kv.rope import LayerRope
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.shared.folded import entering
from harness.kv.token_store import TokenStore
from harness.stages.encoded import Heads
from harness.stages.protocols import Stats
from harness.stages.share.sharing import Bases, Share
from harness.stages.stack import EXACT
from harness.stages.transfers import numbers, sent
from harness.types import KV

HOST = torch.device("cpu")
NO_LAYERS = ModelShape((), 0)


@dataclass(frozen=True, eq=False)
class Layout:
    """The layers of a model under a share, by their numbers. Only layers with full attention and of one shape share.

    folds: a share whose layers store a rotated part of their keys and a latent.
    owners: of readers, the layer whose store they read. pairs: (lower, upper) layers with merged directions.
    times: of layers whose heads are pooled, heads of the model that read one stored head. bases: theirs, where aligned.
    """

    shape: ModelShape = NO_LAYERS
    owners: Mapping[int, int] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ()
    times: Mapping[int, int] = field(default_factory=dict)
    bases: Mapping[int, Bases] = field(default_factory=dict)
    folds: Share | None = None

    @classmethod
    def of(cls, share: Share | None, shape: ModelShape, *, bases: bool = True) -> Layout:
        """The layout of a share, with every layer on its own if there is none; UserError if heads cannot be divided so.

        bases: whether to look for them, which calibration must have measured.
        """
        if share is None:
            return cls(shape)
        if any(shape.layers[i].expanded for i in shape.full_layers):
            raise UserError(
                f"compress.share={type(share).__name__} is not possible with this model: what a layer with latent attention "
                "stores is one head, which only its own matrices expand; legal is share=null"
            )
        if share.folds:
            each = {i: (shape.layers[i].heads, shape.layers[i].d_key, shape.layers[i].d_value) for i in shape.full_layers}
            for sizes in each.values():
                share.widths(*sizes)  # refuses what cannot be
            ups = {i: share.maps(i, *sizes, HOST).up for i, sizes in each.items()} if bases else {}
            times = {i: sizes[0] for i, sizes in each.items()}
            return cls(shape, times=times, bases=ups, folds=share)
        owners: dict[int, int] = {}
        pairs: tuple[tuple[int, int], ...] = ()
        for layers in _alike(shape):
            owners |= share.owners(layers)
            pairs += share.pairs(layers)
        times = {i: shape.layers[i].heads // share.heads(shape.layers[i].heads) for i in shape.full_layers}
        times = {i: n for i, n in times.items() if n > 1}
        of = ((i, shape.layers[i]) for i in times if bases)
        found = {i: share.bases(i, layer.heads, layer.d_key, layer.d_value) for i, layer in of}
        return cls(shape, owners, pairs, times, {i: basis for i, basis in found.items() if basis is not None})

    @property
    def together(self) -> list[tuple[int, ...]]:
        """Layers that must be alike in rotation and device too: readers and owners, and pairs."""
        return [*((owner, reader) for reader, owner in self.owners.items()), *self.pairs]

    @property
    def foreign(self) -> dict[int, int]:
        """KV heads of layers that do not read rows of their own: readers, and those whose heads are pooled."""
        return {i: self.shape.layers[i].heads for i in {*self.owners, *self.times}}

    def stores(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of the layers that have a store of their own, or one for a pair."""
        return tuple(layer for layer in layers if layer not in self.owners)

    def parts(self, layers: Sequence[int], many: int) -> list[tuple[int, ...]]:
        """Layers with stores, in groups of at most `many` that are stored together; of pairs all lower, then all upper ones."""
        pairs = [pair for pair in self.pairs if pair[0] in layers]
        rest = [layer for layer in self.stores(layers) if not any(layer in pair for pair in pairs)]
        parts = [tuple(rest[at : at + many]) for at in range(0, len(rest), many)]
        for at in range(0, len(pairs), few := max(1, many // 2)):
            lower, upper = zip(*pairs[at : at + few], strict=True)
            parts.append(lower + upper)
        return parts

    def merges(self, layers: Sequence[int]) -> bool:
        """Whether a group of layers is one of pairs."""
        return any(layers[0] == low for low, _ in self.pairs)

    def slots(self, groups: Sequence[HeadGroup]) -> dict[int, tuple[Slot, ...]]:
        """For each layer where its heads are stored, in the order of the heads."""
        found: dict[int, tuple[Slot, ...]] = {}
        for group in groups:
            each = group.heads.each
            for at, layer in enumerate(group.heads.layers):
                slot = Slot(group, slice(at * each, (at + 1) * each))
                found[layer] = (*found[layer], slot) if layer in found else (slot,)
        return found | {reader: found[owner] for reader, owner in self.owners.items() if owner in found}

    def entering(self, layers: tuple[int, ...], new: KV, ropes: Sequence[LayerRope | None]) -> tuple[tuple[int, ...], KV]:
        """(layers with stores, what is stored of new tokens [layers * H, L, D]), of those of all these layers.

        ropes: of every layer of the model.
        """
        if not self.owners and not self.times:
            return layers, new
        if self.folds and layers[0] in self.times:
            return layers, entering(self.folds, layers, new, ropes)
        stores = self.stores(layers)
        if stores != layers:
            each = len(new.k_HND) // len(layers)
            index = tuple(layers.index(layer) * each + h for layer in stores for h in range(each))
            chosen = numbers(index, new.k_HND.device)
            new = KV(new.k_HND.index_select(0, chosen), new.v_HND.index_select(0, chosen), new.start)
        times = self.times.get(stores[0], 1) if stores else 1
        if times == 1:
            return stores, new
        bases = [self.bases[layer] for layer in stores] if self.bases else None
        keys, values = (None, None) if bases is None else zip(*bases, strict=True)
        k, v = pooled(new.k_HND, times, keys), pooled(new.v_HND, times, values)
        return stores, KV(k, v, new.start)

    def shared(self, groups: Sequence[HeadGroup], ropes: Sequence[LayerRope | None]) -> tuple[HeadGroup, ...]:
        """Exact head groups of whole layers as they are stored: without readers, heads pooled, pairs in groups of their own."""
        out = []
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for group in groups:
            if not self.stores(group.heads.layers):
                continue  # of a long context a group may be of readers alone
            stores, kv = self.entering(group.heads.layers, KV(group.keys.exact(), group.values.exact(), 0), ropes)
            each = len(kv.k_HND) // max(1, len(stores))
            paired = {layer for pair in self.pairs for layer in pair}
            rest = tuple(layer for layer in stores if layer not in paired)
            if rest == group.heads.layers and each == group.heads.each and not (self.folds and rest[0] in self.times):
                out.append(group.owned())  # it may be a slice of a tensor that holds the others too
                continue
            split = {layer: (kv.k_HND[at : at + each], kv.v_HND[at : at + each]) for at, layer in _starts(stores, each)}
            rows |= {layer: split[layer] for layer in stores if layer in paired}
            if rest == stores:
                out.append(self._exact(rest, kv.k_HND, kv.v_HND))
            elif rest:
                out.append(self._exact(rest, *_joined(split, rest)))
        out += [self._exact(part, *_joined(rows, part)) for part in self.parts(sorted(rows), max(1, len(rows)))]
        return tuple(out)

    def _exact(self, layers: tuple[int, ...], k: Tensor, v: Tensor) -> HeadGroup:
        heads = Heads(layers, 0, len(k) // len(layers))
        return self.marked(HeadGroup(heads, TokenStore.of(k, EXACT, None, heads), TokenStore.of(v, EXACT, None, heads)))

    def marked(self, group: HeadGroup) -> HeadGroup:
        """A new head group that knows how its heads are read; bases are in the cache dtype."""
        like, layers = group.keys.tail_HND, group.heads.layers
        mine = {i: Bases(*(x.to(like.dtype).to(like.device) for x in self.bases[i])) for i in layers if i in self.bases}
        folded = self.folds is not None and layers[0] in self.times
        return replace(group, times=self.times.get(layers[0], 1), bases=mine, folded=folded)

    def stats(self, layer: int, stats: Stats) -> Stats:
        """A layer's statistics for its stored heads: column sums are means over the heads that read one."""
        times = self.times.get(layer, 1)
        sums, queries = self.sums(stats.column_sums_HN, layer), stats.queries_QWD
        if queries is not None and layer in self.bases:
            basis_HDD = sent(self.bases[layer].keys, queries.device)
            by_head = queries.float().unflatten(0, (len(basis_HDD), -1))  # type: ignore[no-untyped-call]
            queries = torch.einsum("hgwd,hde->hgwe", by_head, basis_HDD).flatten(0, 1).to(queries.dtype)
        return stats if times == 1 else replace(stats, column_sums_HN=sums, queries_QWD=queries)

    def sums(self, sums_HN: Tensor | None, layer: int) -> Tensor | None:
        """Column sums [H, N] of whole layers of one shape, `layer` among them, for their stored heads."""
        times = self.times.get(layer, 1)
        if sums_HN is None or times == 1:
            return sums_HN
        pooled_HN: Tensor = sums_HN.unflatten(0, (-1, times)).mean(1)  # type: ignore[no-untyped-call]
        return pooled_HN


def pooled(x_HND: Tensor, times: int, bases: Sequence[Tensor] | None = None) -> Tensor:
    """Means of `times` neighbouring heads, [H / times, N, D], computed in fp32; bases: of each layer, to turn heads first."""
    x = x_HND.float()
    if bases is not None:
        x = x @ torch.cat([sent(basis, x.device) for basis in bases])
    mean: Tensor = x.unflatten(0, (-1, times)).mean(1)  # type: ignore[no-untyped-call]
    return mean.to(x_HND.dtype)


def _alike(shape: ModelShape) -> Iterator[tuple[int, ...]]:
    """Layers with full attention, grouped by shape."""
    kinds: dict[LayerShape, list[int]] = {}
    for i in shape.full_layers:
        kinds.setdefault(shape.layers[i], []).append(i)
    yield from map(tuple, kinds.values())


def _starts(layers: Sequence[int], each: int) -> Iterator[tuple[int, int]]:
    return ((at * each, layer) for at, layer in enumerate(layers))


def _joined(rows: Mapping[int, tuple[Tensor, Tensor]], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    k, v = (torch.cat([rows[layer][side] for layer in layers]) for side in (0, 1))
    return k, v
