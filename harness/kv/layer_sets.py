"""Layers that a codec encodes together lie together: a bound of size may have put them into different head groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from harness.kv.head_group import HeadGroup
from harness.kv.shape import ModelShape
from harness.kv.token_store import TokenStore
from harness.stages.codec.exact import Exact
from harness.stages.encoded import Heads
from harness.stages.stack import Stack


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
    return HeadGroup(heads, TokenStore.of(k, Exact(), None), TokenStore.of(v, Exact(), None), torch.cat(kept) if kept else None)  # type: ignore[abstract]
