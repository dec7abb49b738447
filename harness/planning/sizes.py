"""KV bytes of one sequence under a stack, from shapes alone: exact where sizes follow from them, else bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from harness.kv.memory import layer_bytes, solve_budget
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.shared.stored_shape import constants, stored_shape
from harness.planning.held import Held, held, paged
from harness.stages.codec.by_layer import as_if_measured
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Size:
    """Bytes of one sequence's cache. kinds: as in a record's `bytes`. low, high: bounds of their sum, equal where it is exact.

    Where a split over layers or heads depends on what is in the cache, kinds are those of an even split.
    """

    kinds: Mapping[str, int]
    low: int
    high: int

    @property
    def exact(self) -> bool:
        """Whether the size follows from the shapes."""
        return self.low == self.high


def size(stack: Stack, shape: ModelShape, context: int, itemsize: int, new: int = 0, page: int = 1) -> Size:
    """Bytes after a context and `new` tokens more, on pages of `page` tokens.

    itemsize: bytes of an element in the cache dtype.

    Raises:
        UserError: the budget is too small for this context.
    """
    stack = replace(stack, keys=as_if_measured(stack.keys), values=as_if_measured(stack.values))
    budget = solve_budget(stack, shape, context, itemsize)
    fixed = {"recurrent": shape.constant, "metadata": constants(stack.share, shape, itemsize)}
    kinds: Counter[str] = Counter({kind: count for kind, count in fixed.items() if count})
    low = high = Fraction(sum(fixed.values()))
    shape = stored_shape(stack.share, shape)
    open_layers: list[tuple[Stack, LayerShape, Held]] = []
    windows = [(stack, layer, Held((0,) * layer.heads)) for layer in shape.layers if layer.window is not None]
    known = held(stack, shape, budget, context).items()
    full = [(stack.at(i, shape.full_layers), shape.layers[i], one) for i, one in known]
    for own, layer, one in (*windows, *full):
        now = _later(stack, one, new, page)
        found = _of_layer(own, layer, now.heads, itemsize, context + new, new)
        kinds.update(found)
        if now.free:
            open_layers.append((own, layer, now))
        elif now.total is None:
            low, high = low + sum(found.values()), high + sum(found.values())
        else:
            least, most = _bounds([(own, layer, now)], itemsize, context + new)
            low, high = low + least, high + most
    if open_layers:
        least, most = _bounds(open_layers, itemsize, context + new)
        low, high = low + least, high + most
    return Size(dict(kinds), math.floor(low), math.ceil(high))


def _later(stack: Stack, one: Held, new: int, page: int) -> Held:
    """What a layer holds `new` tokens later, on whole pages; a phase that goes on evicting stays at its budget."""
    more = min(new, stack.every - 1) if stack.evicts_steps else new
    heads = paged([n + more for n in one.heads], page)
    if one.total is None:
        return Held(heads)
    added = (more + page - 1) * len(heads)
    return replace(one, heads=heads, total=(one.total[0] + more * len(heads), one.total[1] + added))


def _of_layer(stack: Stack, layer: LayerShape, heads: tuple[int, ...], itemsize: int, seen: int, late: int) -> dict[str, int]:
    """Bytes by kind of a layer whose heads hold so many tokens, `late` of them from after the context."""
    if len(set(heads)) == 1:
        return layer_bytes(stack, layer, heads[0], itemsize, seen, late)
    kinds: Counter[str] = Counter()
    alone = stack.keys.joint or stack.values.joint  # heads that part are vectors of their own
    for n, times in [(n, 1) for n in heads] if alone else Counter(heads).items():
        kinds.update(layer_bytes(stack, replace(layer, heads=times), n, itemsize, seen, late))
    return dict(kinds) | {"positions": 4 * sum(heads)}


def _bounds(layers: list[tuple[Stack, LayerShape, Held]], itemsize: int, seen: int) -> tuple[Fraction, Fraction]:
    """Bounds of the bytes of layers of which only the total number of tokens is known.

    Bytes of a head are a line in its tokens plus what blocks and exact tokens leave over, so their sum over heads is within the
    line at the total plus the smallest and largest rest of every head.
    """
    slopes, low, high, fewest, most = [], Fraction(0), Fraction(0), 0, 0
    for stack, layer, one in layers:
        slope, least, largest = _line(stack, replace(layer, heads=1), itemsize, one.least, seen)
        slopes.append(slope)
        low, high = low + layer.heads * least, high + layer.heads * largest
        totals = one.total or (0, layer.heads * seen)
        fewest, most = fewest + totals[0], most + totals[1]
    return min(slopes) * fewest + low - 4 * _whole([(layer, one) for _, layer, one in layers], most, seen), max(
        slopes
    ) * most + high


def _whole(layers: list[tuple[LayerShape, Held]], most: int, seen: int) -> int:
    """Most tokens of heads that may be kept whole, which have no positions: a layer's heads all are, or none."""
    heads = sum(layer.heads for layer, one in layers if one.free)
    if not heads:
        return 0
    least = min(one.least for _, one in layers)
    return min(heads, (most - heads * least) // max(1, seen - least)) * seen


def _line(stack: Stack, head: LayerShape, itemsize: int, least: int, seen: int) -> tuple[Fraction, Fraction, Fraction]:
    """(bytes a token, smallest, largest rest) of one head that holds `least` to `seen` tokens, with their positions."""

    def nbytes(n: int) -> int:
        kinds = layer_bytes(stack, head, n, itemsize, seen)
        return sum(kinds.values()) + (0 if "positions" in kinds else 4 * n)

    period = math.lcm(stack.keys.flush, stack.values.flush)
    edge = max(codec.residual + codec.sinks for codec in (stack.keys, stack.values)) + 2 * period
    slope = Fraction(nbytes(edge + 2 * period) - nbytes(edge + period), period)
    near = range(least, min(least + edge, seen) + 1), range(max(seen - 2 * period, least), seen + 1)
    rests = [nbytes(n) - slope * n for some in near for n in some]
    return slope, min(rests), max(rests)
