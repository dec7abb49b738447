"""What a share stores, as shapes: the layers that hold something, their heads and widths, and matrices that are held once."""

from __future__ import annotations

from dataclasses import replace

from harness.errors import UserError
from harness.kv.shape import Expanded, LayerShape, ModelShape
from harness.kv.shared.share_layout import Layout
from harness.stages.share.sharing import Share


def stored_shape(share: Share | None, shape: ModelShape) -> ModelShape:
    """The layers that hold something, with the heads they store; a pair of merged layers is one."""
    if share is None:
        return shape
    layout = Layout.of(share, shape, bases=False)
    upper = {high for _, high in layout.pairs}
    lower = {low for low, _ in layout.pairs}
    layers = []
    for i in layout.stores(range(len(shape.layers))):
        layer = shape.layers[i]
        if i in lower:
            layer = replace(layer, unmerged=share.unmerged)
        if i not in upper:
            folds = share.folds and i in layout.times
            layers.append(_folded(share, layer) if folds else replace(layer, heads=layer.heads // layout.times.get(i, 1)))
    return replace(shape, layers=tuple(layers), numbers=(), readers=())


def stored_dims(share: Share | None, shape: ModelShape) -> set[tuple[int, int]]:
    """Head dims of the keys and of the values that layers with full attention store, whatever heads share them.

    None where the share cannot be had of these layers, which is refused when it is run.
    """
    layers = [shape.layers[i] for i in shape.full_layers]
    if share is not None and share.folds:
        try:
            layers = [_folded(share, layer) for layer in layers]
        except UserError:
            return set()
    return {(layer.d_key, layer.d_value) for layer in layers}


def constants(share: Share | None, shape: ModelShape, itemsize: int) -> int:
    """Bytes of the matrices that pooled heads are turned by, or folded ones are read by, of all layers."""
    if share is not None and share.folds:
        return sum(_unfolding(share, shape.layers[i]) for i in shape.full_layers) * itemsize
    if share is None or not share.aligned:
        return 0
    times = Layout.of(share, shape, bases=False).times
    layers = [shape.layers[i] for i in times]
    return sum(one.heads * (one.d_key**2 + one.d_value**2) * itemsize for one in layers)


def _folded(share: Share, layer: LayerShape) -> LayerShape:
    """A layer as it stores two parts: one head, whose key is the rotated one and whose value is the latent."""
    wide = share.widths(layer.heads, layer.d_key, layer.d_value)
    read = Expanded(layer.heads, 2 * layer.d_key, layer.d_value)
    return replace(layer, heads=1, d_key=wide.rotated, d_value=wide.latent, expanded=read)


def _unfolding(share: Share, layer: LayerShape) -> int:
    """Numbers of the matrices that read a layer's two parts."""
    wide = share.widths(layer.heads, layer.d_key, layer.d_value)
    return layer.heads * (wide.rotated + (layer.d_key + layer.d_value) * wide.latent)
