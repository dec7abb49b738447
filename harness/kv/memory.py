"""Bytes of a cache: measured from its tensors, and predicted from shapes; and what a record says about storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """Bytes by kind of (kind, tensor) pairs: logical counts elements, allocated counts storages, each storage once."""
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


def saves(store: TokenStore) -> bool:
    """Whether the encoded tokens, with metadata and constants, take fewer bytes than they would exact."""
    shape = (store.tail_HND.shape[0], store.n_encoded, store.tail_HND.shape[2])
    return measure(store.encoded_tensors()).total < math.prod(shape) * store.tail_HND.element_size()


def touched(groups: Iterable[HeadGroup], seen: int) -> int:
    """Tokens that were evicted or are not stored as they were, summed over layers and KV heads; seen: tokens per head before.

    Measured, not claimed by the codec: encoded tokens count if their numbers changed or bytes were saved.
    """
    total = 0
    for group in groups:
        stores = (group.keys, group.values)
        encoded = max(one.n_encoded if one.changed or (one.n_encoded and saves(one)) else 0 for one in stores)
        total += group.heads.n * (seen - group.n + encoded)
    return total


def storage(groups: Iterable[HeadGroup]) -> str:
    """The record's `storage`: "simulated" if a codec changed numbers and saved no bytes, else "packed"."""
    stores = [store for group in groups for store in (group.keys, group.values)]
    return "simulated" if any(one.changed and one.n_encoded and not saves(one) for one in stores) else "packed"


def _store_bytes(codec: Codec, h: int, n: int, d: int, itemsize: int) -> dict[str, int]:
    ready = codec.leaving(max(n - codec.sinks, 0), 0)
    payload, metadata = codec.nbytes(h, ready, d, itemsize)
    exact = h * (n - ready) * d * itemsize
    found = {"payload": payload, "metadata": metadata}
    return found | ({"tail": exact} if codec.lossy else {"payload": payload + exact})


def layer_bytes(stack: Stack, layer: LayerShape, n: int, itemsize: int, seen: int) -> dict[str, int]:
    """Bytes by kind of one layer that holds n tokens per head after `seen` tokens (a window its own), without scratch.

    The closed formula; what caches hold is measured, and equal to it.
    """
    if layer.window is not None:
        return {"payload": layer.held(seen) * layer.token_bytes(itemsize)}
    evicted = stack.keep is not None and n < seen
    return _added(
        _store_bytes(stack.keys, layer.heads, n, layer.d_key, itemsize),
        _store_bytes(stack.values, layer.heads, n, layer.d_value, itemsize),
        {"positions": 4 * layer.heads * n if evicted else 0, "state": 4 * layer.heads * n if stack.keeps_state else 0},
    )


def _added(*kinds: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in kinds:
        for kind, count in one.items():
            total[kind] += count
    return {kind: count for kind, count in total.items() if count}


def predict(stack: Stack, shape: ModelShape, n: int, itemsize: int, seen: int) -> int:
    """Bytes of a cache with n tokens per full layer and head after `seen` tokens, by a closed formula, without scratch."""
    alike = Counter(shape.layers).items()
    return sum(times * sum(layer_bytes(stack, layer, n, itemsize, seen).values()) for layer, times in alike)


@dataclass(frozen=True)
class Budget:
    """Tokens that every layer and KV head may hold, already solved for a context (None: all stay)."""

    tokens: int | None


def solve_budget(stack: Stack, shape: ModelShape, context: int, itemsize: int) -> int | None:
    """Tokens per layer and head for a context of `context` tokens (None: all); UserError if the budget is too small."""
    return stack.budget(context, lambda n: predict(stack, shape, n, itemsize, context))


def codec_info(stack: Stack, groups: Sequence[HeadGroup]) -> dict[str, Any]:
    """The record's `codec_info`: the codecs' own, and `clipped`, the share of clipped elements of all encoded so far."""
    found = {}
    for role, codec in (("keys", stack.keys), ("values", stack.values)):
        stores: list[TokenStore] = [getattr(group, role) for group in groups]
        stores = [one for one in stores if one.codec.name == codec.name and one.written]
        info = dict(stores[0].codec.info() if stores else codec.info())
        if codec.lossy:
            info["clipped"] = sum(one.clipped for one in stores) / max(1, sum(one.written for one in stores))
        found[role] = info
    return found
