"""Bytes: measured from the tensors a store holds, and predicted from shapes alone. It knows no model and no policy names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.kv.head_group import HeadGroup
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.token_store import TokenStore
from harness.stages.codec.base import Codec
from harness.stages.stack import Stack
from harness.types import Bytes


def measure(tensors: Iterable[tuple[str, Tensor]]) -> Bytes:
    """Sum (byte kind, tensor) pairs: logical is what elements take, allocated what storages hold, each storage once."""
    logical: dict[str, int] = {}
    allocated: dict[str, int] = {}
    storages: set[int] = set()
    for kind, tensor in tensors:
        logical[kind] = logical.get(kind, 0) + tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in storages:
            storages.add(storage.data_ptr())
            allocated[kind] = allocated.get(kind, 0) + storage.nbytes()
    return Bytes(logical, allocated)


def saves(side: TokenStore) -> bool:
    """Whether encoded rows, with their metadata and constants, take fewer bytes than they did exact."""
    shape = (side.tail_HND.shape[0], side.n_encoded, side.tail_HND.shape[2])
    return measure(side.encoded_tensors()).total < math.prod(shape) * side.tail_HND.element_size()


def touched(parts: Iterable[HeadGroup], seen: int) -> int:
    """Rows evicted, or stored otherwise than they were, over layers and KV heads.

    Measured, whatever the codec says of itself: encoded rows count where numbers changed or bytes were saved.
    """
    total = 0
    for part in parts:
        sides = (part.keys, part.values)
        otherwise = max(side.n_encoded if side.changed or (side.n_encoded and saves(side)) else 0 for side in sides)
        total += part.heads.n * (seen - part.n + otherwise)
    return total


def storage(parts: Iterable[HeadGroup]) -> str:
    """What a record says of stored bytes: "simulated" where a codec changed numbers and saved none, else "packed"."""
    sides = [side for part in parts for side in (part.keys, part.values)]
    return "simulated" if any(side.changed and side.n_encoded and not saves(side) for side in sides) else "packed"


def _side(codec: Codec, h: int, n: int, d: int, itemsize: int) -> int:
    ready = codec.leaving(max(n - codec.sinks, 0), 0)
    return sum(codec.nbytes(h, ready, d, itemsize)) + h * (n - ready) * d * itemsize


def _layer(stack: Stack, layer: LayerShape, n: int, itemsize: int, seen: int) -> int:
    if layer.window is not None:
        return layer.held(seen) * layer.row_bytes(itemsize)
    rows = _side(stack.keys, layer.heads, n, layer.d_key, itemsize) + _side(
        stack.values, layer.heads, n, layer.d_value, itemsize
    )
    evicted = stack.keep is not None and n < seen
    positions = 4 * layer.heads * n if evicted else 0
    state = 4 * layer.heads * n if stack.keeps_state else 0
    return rows + positions + state


def predict(stack: Stack, shape: ModelShape, n: int, itemsize: int, seen: int) -> int:
    """Bytes of a store that holds n rows per full layer and head after `seen` tokens: the closed formula, scratch excluded."""
    return sum(times * _layer(stack, layer, n, itemsize, seen) for layer, times in Counter(shape.layers).items())


@dataclass(frozen=True)
class Budget:
    """Tokens that every layer and KV head may hold, already solved for a context (None: all stay)."""

    tokens: int | None


def solve_budget(stack: Stack, shape: ModelShape, context: int, itemsize: int) -> int | None:
    """Rows per layer and head for a context of so many tokens (None: all stay); UserError when the budget is too small."""
    return stack.budget(context, lambda n: predict(stack, shape, n, itemsize, context))


def codec_info(stack: Stack, parts: Sequence[HeadGroup]) -> dict[str, Any]:
    """What codecs say of how keys and values are stored; clipped: the share of all elements encoded so far."""
    found = {}
    for role, codec in (("keys", stack.keys), ("values", stack.values)):
        sides: list[TokenStore] = [getattr(part, role) for part in parts]
        sides = [side for side in sides if side.codec.name == codec.name and side.written]
        info = dict(sides[0].codec.info() if sides else codec.info())
        if codec.lossy:
            info["clipped"] = sum(side.clipped for side in sides) / max(1, sum(side.written for side in sides))
        found[role] = info
    return found
