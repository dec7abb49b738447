"""How exact keys and values become head groups: positions, rotation and codec as the stack says, in groups of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.kv.forward import Forward
from harness.kv.head_group import HeadGroup
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.token_store import TokenStore, own
from harness.stages.encoded import Heads
from harness.stages.protocols import Stats
from harness.stages.stack import Stack
from harness.types import KV

GROUP_ELEMENTS = 1 << 26  # most key elements of a new head group: encoding needs a few fp32 copies of them


def new_tokens(run: Forward, group: int, member: int, seen: int, rope: LayerRope | None) -> KV:
    """K and V [layers * H, L, D] that a forward computed in a group of layers, with their positions.

    member: which sequence of the forward's batch. rope: un-rotates the keys, for stacks that store them without rotation.
    """
    k, v = map(own, run.rows(group, member))
    if rope is not None:
        k = rope.unrotate(k, torch.arange(run.start(member), run.start(member) + k.shape[1], device=k.device))
    pos = run.positions(seen, k.shape[1], k.device).expand(k.shape[0], -1)
    return KV(k, v, pos)


def recorded_sums(run: Forward, heads: Heads, member: int) -> Tensor | None:
    """Column sums [H, N + L] of these heads in a forward, for one sequence of its batch; None if not recorded."""
    sums = Stats.join([run.stats[layer][member] for layer in heads.layers]).column_sums_HN
    return None if sums is None else own(sums)  # those of a batch are views of one tensor


def first_groups(
    shape: ModelShape,
    stack: Stack,
    layers: tuple[int, ...],
    new: KV,
    view_dtype: torch.dtype,
    *,
    sums: tuple[Forward, int] | None,
) -> list[HeadGroup]:
    """Head groups of the first tokens of some layers.

    view_dtype: of a decoded copy, for stacks that keep one. sums: (forward, sequence) to take column sums from, None for none.
    """
    k, v, heads = new.k_HND, new.v_HND, shape.layers[layers[0]].heads
    many = max(1, GROUP_ELEMENTS // max(1, k[:heads].numel()))  # layers in a head group
    groups = []
    for at in range(0, len(layers), many):
        chosen = Heads(layers[at : at + many], 0, heads)
        here = slice(at * heads, at * heads + chosen.n)
        keys, values = _stores(shape, stack, k[here], v[here], chosen, view_dtype)
        groups.append(HeadGroup(chosen, keys, values, None, sums and recorded_sums(sums[0], chosen, sums[1])))
    return groups


def stored(
    group: HeadGroup, shape: ModelShape, stack: Stack, seen: int, rope: LayerRope | None, view_dtype: torch.dtype
) -> HeadGroup:
    """An exact head group as the stack stores it. rope: as in `new_tokens`."""
    k, v = group.keys.exact(), group.values.exact()
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
    by_head = queries.view(len(heads.layers), layer.heads, -1, *queries.shape[1:])
    seen = by_head[:, heads.start : heads.stop].flatten(0, 1)
    return replace(stack, keys=codec.observing(seen, group.keys.exact()))


def _stores(
    shape: ModelShape, stack: Stack, k: Tensor, v: Tensor, heads: Heads, view_dtype: torch.dtype
) -> Sequence[TokenStore]:
    """Keys and values in token stores; those of sliding-window layers stay exact."""
    used = stack if shape.layers[heads.layers[0]].window is None else Stack()
    dtype = view_dtype if used.read == "cached" else None
    return [TokenStore.of(x, codec, dtype, heads) for x, codec in ((k, used.keys), (v, used.values))]
