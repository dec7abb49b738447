"""What a scorer sees of a head group: its tokens, decoded, with the statistics of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.kv.head_group import HeadGroup
from harness.kv.rope import LayerRope
from harness.stages.protocols import LayerView, Stats
from harness.stages.single_views import SingleViews


def head_group_view(
    group: HeadGroup, stats: Mapping[int, Stats], seen: int, seed: int, rope: LayerRope | None, turn: str | None = None
) -> LayerView:
    """View of all layers of a head group, with the single layers in `each`.

    stats: by layer; column sums stored with the group replace those in `stats`. turn: None if the stored keys are rotated; else
    the view rotates them as attention does, by their "original" positions or their index in the "cache".
    """
    pos = group.positions(seen)

    def keys(at: slice) -> Tensor:
        stored = group.keys.read(torch.float32, at)
        if turn is None or rope is None:
            return stored
        return rope.range(stored, 0) if turn == "cache" else rope.rotate(stored, pos[at])

    def view(layers: Sequence[int], at: slice, each: SingleViews[LayerView] | None = None) -> LayerView:
        found = Stats.join([stats[layer] for layer in layers])
        if group.sums_HN is not None:
            found = replace(found, column_sums_HN=group.sums_HN[at])
        return LayerView(
            layer=layers[0],
            seen=seen,
            pos_HN=pos[at],
            stats=found,
            read_keys=lambda: keys(at),
            read_values=lambda: group.values.read(torch.float32, at),
            seed=seed,
            rope=rope,
            each=each or SingleViews(),
        )

    whole, layers = slice(0, group.heads.n), group.heads.layers
    if len(layers) == 1:
        return view(layers, whole)
    kinds = {(stats[layer].scaling, stats[layer].softmax.kind) for layer in layers}
    singles = SingleViews(layers, lambda k: view((layers[k],), group.slot(layers[k])), alike=len(kinds) == 1)
    return view(layers, whole, singles)
