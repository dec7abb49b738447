"""How many tokens each layer and KV head holds after a context, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.shape import LayerShape, ModelShape
from harness.stages.keep import Keep
from harness.stages.protocols import HeadBudget, LayerBudget, LayerView, Stats
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Held:
    """Tokens that the KV heads of one full layer hold.

    heads: of each head; where the split depends on what is in the cache, an even one stands here.
    least, total: then the fewest tokens of a head, and the (least, most) tokens of the layer, summed over its heads.
    free: whether the layer's own budget depends on data too, so that only totals over layers are known.
    """

    heads: tuple[int, ...]
    least: int = 0
    total: tuple[int, int] | None = None
    free: bool = False


def by_shape(split: LayerBudget | HeadBudget) -> bool:
    """Whether a split reads only shapes; not inherited, as a subclass may read more."""
    return bool(vars(type(split)).get("by_shape", False))


def held(stack: Stack, shape: ModelShape, budget: int | None, context: int) -> dict[int, Held]:
    """What every full layer holds after `context` tokens under a solved budget (None: all stay)."""
    layers = {i: shape.layers[i] for i in shape.full_layers}
    keep = stack.keep
    if keep is None or budget is None:
        return {i: Held((context,) * layer.heads) for i, layer in layers.items()}
    counts = dict.fromkeys(layers, 0)
    step = stack.chunk if stack.chunked else context
    found: dict[int, Held] = {}
    for start in range(0, context, step):
        seen = min(start + step, context)
        counts = {i: n + seen - start for i, n in counts.items()}
        found = _evicted(keep, budget, layers, counts, seen)
        counts = {i: one.heads[0] for i, one in found.items()}
    return found


def _evicted(keep: Keep, budget: int, layers: dict[int, LayerShape], counts: dict[int, int], seen: int) -> dict[int, Held]:
    """What layers hold after one eviction, if they held so many tokens a head before."""
    shares = _shares(keep, budget, layers, counts, seen)
    protected = sum(keep.protected(budget))
    least = protected if shares is not None else _fewest(keep, protected)
    found = {}
    for i, layer in layers.items():
        if shares is None:
            even = min(counts[i], budget)
            total = (layer.heads * (even if _spends_all(keep.layers) else least), layer.heads * even)
            found[i] = Held((even,) * layer.heads, least, total, free=True)
        elif counts[i] <= shares[i]:
            found[i] = Held((counts[i],) * layer.heads)
        else:
            found[i] = _over_heads(keep, shares[i], layer.heads, counts[i], i)
    return found


def _fewest(keep: Keep, protected: int) -> int:
    """Tokens of a head that every layer keeps under a split that depends on data; a smaller share would be refused."""
    own = getattr(keep.layers.beyond(protected), "protected", 0)
    return next(n for n in count(max(own, 1)) if n >= protected or _legal(keep, n))


def _legal(keep: Keep, tokens: int) -> bool:
    try:
        keep.protected(tokens)
    except UserError:
        return False
    return True


def _spends_all(split: LayerBudget | HeadBudget) -> bool:
    return bool(vars(type(split)).get("spends_all", False))


def _shares(keep: Keep, budget: int, layers: dict[int, LayerShape], counts: dict[int, int], seen: int) -> dict[int, int] | None:
    """The layers' budgets in tokens per head; None if they depend on data."""
    if all(n <= budget for n in counts.values()):
        return dict.fromkeys(layers, budget)
    if not by_shape(keep.layers):
        return None
    split = keep.layers.beyond(sum(keep.protected(budget)))
    views = [_shapes_only(i, layer.heads, counts[i], seen) for i, layer in layers.items()]
    return dict(zip(layers, split.split(budget, views), strict=True))


def _over_heads(keep: Keep, share: int, heads: int, n: int, layer: int) -> Held:
    sinks, recent = keep.protected(share)
    protected = sinks + recent
    if by_shape(keep.heads):
        scores = torch.empty(heads, n - protected, device="meta")
        return Held(tuple(count + protected for count in keep.heads.split(share - protected, scores, layer)))
    fewest = heads * share if _spends_all(keep.heads) else heads * protected
    return Held((share,) * heads, protected, (fewest, heads * share))


def _shapes_only(layer: int, heads: int, n: int, seen: int) -> LayerView:
    """A view of a layer without numbers in it."""

    def nothing() -> Tensor:
        raise AssertionError("a split that says by_shape reads no keys and values")

    pos_HN = torch.empty(heads, n, dtype=torch.int32, device="meta")
    return LayerView(layer=layer, seen=seen, pos_HN=pos_HN, stats=Stats(), read_keys=nothing, read_values=nothing)


def paged(heads: Sequence[int], page: int) -> tuple[int, ...]:
    """Tokens rounded up to whole pages, as serving engines allocate them."""
    return tuple(-(-n // page) * page for n in heads)
