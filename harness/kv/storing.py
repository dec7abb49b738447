"""How exact keys and values become head groups: positions, rotation and codec as the stack says, in groups of bounded size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from harness.kv.forward import Forward
from harness.kv.head_group import HeadGroup
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.shared.pair_store import PairStore
from harness.kv.shared.share_layout import Layout
from harness.kv.token_store import TokenStore, own
from harness.stages.codec.exact import Exact
from harness.stages.encoded import Heads
from harness.stages.protocols import Stats
from harness.stages.stack import Stack
from harness.stages.transfers import numbers
from harness.types import KV

GROUP_ELEMENTS = 1 << 26  # most key elements of a new head group: encoding needs a few fp32 copies of them


def new_tokens(run: Forward, group: int, member: int, seen: int, rope: LayerRope | None) -> KV:
    """K and V [layers * H, L, D] that a forward computed in a group of layers; seen: tokens before them.

    member: which sequence of the forward's batch. rope: un-rotates the keys, for stacks that store them without rotation.
    """
    k, v = map(own, run.rows(group, member))
    if rope is not None:
        k = rope.unrotate(k, torch.arange(run.start(member), run.start(member) + k.shape[1], device=k.device))
    return KV(k, v, seen)


def of_heads(new: KV, heads: Heads, group: tuple[int, ...]) -> KV:
    """K and V of `heads`, out of those of all heads of a group of layers."""
    each = len(new.k_HND) // len(group)
    if heads.layers == group and heads.each == each:
        return new
    index = (group.index(layer) * each + h for layer in heads.layers for h in range(heads.start, heads.stop))
    chosen = numbers(tuple(index), new.k_HND.device)
    return KV(new.k_HND.index_select(0, chosen), new.v_HND.index_select(0, chosen), new.start)


def recorded_sums(run: Forward, heads: Heads, member: int) -> Tensor | None:
    """Column sums [H, N + L] of these heads in a forward, for one sequence of its batch; None if not recorded."""
    if member not in run.asking:
        return None
    sums = Stats.join([run.stats[layer][member] for layer in heads.layers]).column_sums_HN
    return None if sums is None else own(sums)  # those of a batch are views of one tensor


def first_groups(
    layout: Layout,
    stack: Stack,
    layers: tuple[int, ...],
    new: KV,
    view_dtype: torch.dtype,
    *,
    sums: tuple[Forward, int] | None,
) -> list[HeadGroup]:
    """Head groups of the first tokens of some layers with stores.

    view_dtype: of a decoded copy, for stacks that keep one. sums: (forward, sequence) to take column sums from, None for none.
    """
    heads = len(new.k_HND) // len(layers)
    many = max(1, GROUP_ELEMENTS // max(1, new.k_HND[:heads].numel()))  # layers in a head group
    groups = []
    several = alike(layout.shape, stack, layers)
    for part in (part for some in several for part in layout.parts(some, many)):
        chosen = Heads(part, 0, heads)
        x, y = (_of_layers(one, layers, part) for one in (new.k_HND, new.v_HND))
        if len(several) > 1 or stack.share is not None:  # what stays exact must not keep alive what is encoded or shared
            x, y = own(x), own(y)
        keys, values = _stores(layout.shape, stack, x, y, chosen, view_dtype)
        state = layout.sums(sums and recorded_sums(sums[0], chosen, sums[1]), part[0])
        groups.append(layout.marked(HeadGroup(chosen, keys, values, None, state)))
    return groups


def stored(
    group: HeadGroup, shape: ModelShape, stack: Stack, seen: int, rope: LayerRope | None, view_dtype: torch.dtype
) -> list[HeadGroup]:
    """An exact head group as the stack stores it, one for each pair of codecs of its layers. rope: as in `new_tokens`."""
    parts = alike(shape, stack, group.heads.layers)
    return [_stored(group.rest(part), shape, stack, seen, rope, view_dtype) for part in parts]


def alike(shape: ModelShape, stack: Stack, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Layers of one shape in groups that have the same codecs."""
    if shape.layers[layers[0]].window is not None:
        return [layers]
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(id(stack.at(layer, shape.full_layers)), []).append(layer)
    return [tuple(some) for some in found.values()]


def _of_layers(x: Tensor, layers: tuple[int, ...], some: tuple[int, ...]) -> Tensor:
    """The heads of some of the layers of x [layers * H, ...]; a view where they follow one another."""
    first, heads = layers.index(some[0]), len(x) // len(layers)
    if layers[first : first + len(some)] == some:
        return x[first * heads : (first + len(some)) * heads]
    return x.unflatten(0, (len(layers), heads))[[layers.index(layer) for layer in some]].flatten(0, 1)  # type: ignore[no-untyped-call,no-any-return]


def _stored(
    group: HeadGroup, shape: ModelShape, stack: Stack, seen: int, rope: LayerRope | None, view_dtype: torch.dtype
) -> HeadGroup:
    k, v = group.keys.exact(), group.values.exact()
    first = group.heads.layers[0]
    if shape.layers[first].window is None and stack.at(first, shape.full_layers) is not stack:
        k, v = own(k), own(v)  # what stays exact must not keep alive the layers that are encoded
    if rope is not None:
        pos = group.positions(seen)
        k = rope.unrotate(k, pos[0] if group.pos_HN is None else pos)
    keys, values = _stores(shape, stack, k, v, group.heads, view_dtype)
    return replace(group, keys=keys, values=values)


def observing(stack: Stack, shape: ModelShape, group: HeadGroup, stats: Sequence[Stats]) -> Stack:
    """The stack, with codecs that have seen an exact head group's keys and queries if they ask. stats: of every layer."""
    heads, codec = group.heads, stack.keys
    layer = shape.layers[heads.layers[0]]
    if not codec.needs.queries or layer.window is not None:
        return stack
    queries = Stats.join([stats[i] for i in heads.layers]).queries_QWD
    assert queries is not None, "a prefill records what its stacks need"
    by_head = queries.view(len(heads.layers), layer.heads // group.times, -1, *queries.shape[1:])
    seen = by_head[:, heads.start : heads.stop].flatten(0, 1)
    return replace(stack, keys=codec.observing(seen.clone(), group.keys.exact().clone()))  # others hold them too


def _used(stack: Stack, shape: ModelShape, layer: int) -> Stack:
    """The stack of one layer: with its own codecs, or that of the full cache where only a window is stored."""
    return stack.at(layer, shape.full_layers) if shape.layers[layer].window is None else Stack()


def _stores(
    shape: ModelShape, stack: Stack, k: Tensor, v: Tensor, heads: Heads, view_dtype: torch.dtype
) -> Sequence[TokenStore]:
    """Keys and values in token stores; those of sliding-window layers stay exact."""
    first = heads.layers[0]
    used = _used(stack, shape, first)
    if used.share is not None and Layout.of(used.share, shape).merges(heads.layers):
        return [PairStore.of_pairs(x, codec, used.share, heads) for x, codec in ((k, used.keys), (v, used.values))]
    dtype = view_dtype if used.read == "cached" else None
    return [TokenStore.of(x, codec, dtype, heads) for x, codec in ((k, used.keys), (v, used.values))]


def whole_sets(groups: Sequence[HeadGroup], stack: Stack, shape: ModelShape) -> Sequence[HeadGroup]:
    """Exact head groups that hold whole sets of the layers that a codec encodes together: these, or else one for each set.

    Layers that are alike hold equally many tokens, as codecs of several layers are refused with any keep that says otherwise.
    """
    many = math.lcm(*(getattr(codec, "layers_together", 1) for codec in (stack.keys, stack.values)))
    found: list[HeadGroup] = []
    for layer, some in groupby(groups, lambda group: shape.layers[group.heads.layers[0]]):
        alike = list(some)
        whole = layer.window is not None or all(len(group.heads.layers) % many == 0 for group in alike)
        found += alike if whole else _cut(alike, many)
    return found


def _cut(groups: Sequence[HeadGroup], many: int) -> list[HeadGroup]:
    """A head group of its own for every `many` layers."""
    places = [(group, layer) for group in groups for layer in group.heads.layers]
    return [_joined(places[at : at + many]) for at in range(0, len(places), many)]


def _joined(places: Sequence[tuple[HeadGroup, int]]) -> HeadGroup:
    """One head group of these layers."""
    first = places[0][0]
    heads = Heads(tuple(layer for _, layer in places), first.heads.start, first.heads.stop)
    k = torch.cat([group.keys.exact()[group.slot(layer)] for group, layer in places])
    v = torch.cat([group.values.exact()[group.slot(layer)] for group, layer in places])
    kept = [group.pos_HN[group.slot(layer)] for group, layer in places if group.pos_HN is not None]
    bases = {layer: group.bases[layer] for group, layer in places if layer in group.bases}
    keys, values = (TokenStore.of(x, Exact(), None) for x in (k, v))  # type: ignore[abstract]
    return HeadGroup(heads, keys, values, torch.cat(kept) if kept else None, times=first.times, bases=bases)
