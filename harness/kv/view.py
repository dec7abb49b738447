"""What a scorer gets to see of a stored part: decoded rows and recorded statistics. It knows no policy and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.kv.head_group import HeadGroup
from harness.kv.rope import LayerRope
from harness.stages.protocols import LayerView, Stats


def head_group_view(
    part: HeadGroup, stats: Mapping[int, Stats], seen: int, seed: int, rope: LayerRope | None, *, rotated: bool
) -> LayerView:
    """All layers of a part in one view, the single layers in its `each`; sums carried in the store replace those of `stats`.

    rotated: False when the stored keys have no rotation: they are shown at their places in the cache, as queries saw them.
    """
    pos = part.positions(seen)

    def keys(at: slice) -> Tensor:
        stored = part.keys.read(torch.float32, at)
        return stored if rotated or rope is None else rope.range(stored, 0)

    def view(layers: Sequence[int], at: slice, each: tuple[LayerView, ...] = ()) -> LayerView:
        found = Stats.join([stats[layer] for layer in layers])
        if part.sums_HN is not None:
            found = replace(found, column_sums_HN=part.sums_HN[at])
        return LayerView(
            layer=layers[0],
            seen=seen,
            pos_HN=pos[at],
            stats=found,
            read_keys=lambda: keys(at),
            read_values=lambda: part.values.read(torch.float32, at),
            seed=seed,
            rope=rope,
            each=each,
        )

    whole, layers = slice(0, part.heads.n), part.heads.layers
    if len(layers) == 1:
        return view(layers, whole)
    return view(layers, whole, tuple(view((layer,), part.slot(layer)) for layer in layers))
