"""Bytes of a cache: measured from its tensors, and predicted from shapes; and what a record says about storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from harness.errors import UserError
from harness.kv.head_group import HeadGroup
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.shared.pair_store import PairStore
from harness.kv.shared.share_layout import Layout
from harness.kv.shared.stored_shape import constants, stored_shape
from harness.kv.token_store import TokenStore
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import ByLayer, codecs_of
from harness.stages.heads.uniform_heads import Uniform
from harness.stages.merge.parting import keeps_number
from harness.stages.share.minicache import whole_tokens
from harness.stages.stack import Stack
from harness.types import Bytes


def measure(tensors: Iterable[tuple[str, Tensor]]) -> Bytes:
    """Bytes by kind of (kind, tensor) pairs: logical counts elements, allocated counts storages, each storage once."""
    logical: dict[str, int] = {}
    allocated: dict[str, int] = {}
    storages: set[int] = set()
    for kind, tensor in tensors:
        logical[kind] = logical.get(kind, 0) + tensor.nbytes
        storage = tensor.untyped_storage()
        if (size := storage.nbytes()) and (at := storage.data_ptr()) not in storages:
            storages.add(at)
            allocated[kind] = allocated.get(kind, 0) + size
    return Bytes(logical, allocated)


def saves(store: TokenStore) -> bool:
    """Whether the encoded tokens, with metadata and constants, take fewer bytes than they would exact."""
    heads = len(store.norms_HN) if isinstance(store, PairStore) else store.tail_HND.shape[0]
    shape = (heads, store.n_encoded, store.tail_HND.shape[2])
    return measure(store.encoded_tensors()).total < math.prod(shape) * store.tail_HND.element_size()


def touched(groups: Iterable[HeadGroup], seen: int, layout: Layout) -> int:
    """Tokens that were evicted or are not stored as they were, summed over layers and KV heads; seen: tokens per head before.

    Measured, not claimed by the codec: encoded tokens count if their numbers changed or bytes were saved. All tokens of layers
    and heads without a store of their own count.
    """
    foreign = layout.foreign
    total = sum(foreign.values()) * seen
    for group in groups:
        if group.heads.layers[0] in foreign:
            continue
        stores = (group.keys, group.values)
        encoded = max(one.n_encoded if one.changed or (one.n_encoded and saves(one)) else 0 for one in stores)
        total += group.heads.n * (seen - group.n + encoded)
    return total


def storage(groups: Iterable[HeadGroup]) -> str:
    """The record's `storage`: "simulated" if a codec changed numbers and stores tokens in no fewer bytes, else "packed".

    Constants are not among these bytes: a basis may outweigh what it saves of a short context, and is stored all the same.
    """
    stores = [store for group in groups for store in (group.keys, group.values)]
    return "simulated" if any(one.changed and one.n_encoded and not _packed(one) for one in stores) else "packed"


def _packed(store: TokenStore) -> bool:
    """Whether the encoded tokens, with their metadata, take fewer bytes than they would exact."""
    h, _, d = store.tail_HND.shape
    coded = (t for chunk in store.chunks for t in (*chunk.payload.values(), *chunk.metadata.values()))
    size = store.tail_HND.element_size()
    return sum(t.numel() * t.element_size() for t in coded) < h * store.n_encoded * d * size


def _store_bytes(codec: Codec, h: int, n: int, d: int, itemsize: int, late: int) -> dict[str, int]:
    ready = codec.leaving(max(n - (late if getattr(codec, "once", False) else 0) - codec.sinks, 0), 0)
    payload, metadata = codec.nbytes(h, ready, d, itemsize)
    exact = h * (n - ready) * d * itemsize
    found = {"payload": payload, "metadata": metadata}
    return found | ({"tail": exact} if codec.lossy else {"payload": payload + exact})


def _merged_bytes(unmerged: Fraction, h: int, n: int, d: int, itemsize: int) -> dict[str, int]:
    """Beside the directions of two layers: a magnitude for each, tokens that are kept whole, and which they are."""
    whole = whole_tokens(unmerged, n)
    return {"metadata": 2 * h * n * itemsize + 4 * h * whole, "tail": 2 * h * whole * d * itemsize}


def layer_bytes(stack: Stack, layer: LayerShape, n: int, itemsize: int, seen: int, late: int = 0) -> dict[str, int]:
    """Bytes by kind of one layer that holds n tokens per head after `seen` tokens (a window its own), without scratch.

    late: how many of the n came after the context.

    The closed formula; what caches hold is measured, and equal to it. stack: that of the layer (`Stack.at`).
    """
    if layer.window is not None:
        return {"payload": layer.held(seen) * layer.token_bytes(itemsize)}
    evicted = stack.keep is not None and n < seen
    beside = [
        _merged_bytes(layer.unmerged, layer.heads, n, d, itemsize)
        for d in (layer.d_key, layer.d_value)
        if layer.unmerged is not None
    ]
    return _added(
        _store_bytes(stack.keys, layer.heads, n, layer.d_key, itemsize, late),
        _store_bytes(stack.values, layer.heads, n, layer.d_value, itemsize, late),
        *beside,
        {"positions": 4 * layer.heads * n if evicted else 0, "state": 4 * layer.heads * n if stack.keeps_state else 0},
        {"state": 4 * layer.heads if evicted and stack.evicts_steps and keeps_number(stack.merge) else 0},
    )


def _added(*kinds: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in kinds:
        for kind, count in one.items():
            total[kind] += count
    return {kind: count for kind, count in total.items() if count}


def predict(stack: Stack, shape: ModelShape, n: int, itemsize: int, seen: int, late: int = 0) -> int:
    """Bytes of a cache with n tokens per full layer and head after `seen` tokens, by a closed formula, without scratch.

    late: how many of the n came after the context.
    """
    turning, shape = constants(stack.share, shape, itemsize), stored_shape(stack.share, shape)
    layers = shape.full_layers
    stacks = [stack.at(i, layers) if layer.window is None else stack for i, layer in enumerate(shape.layers)]
    alike = Counter(zip(shape.layers, map(id, stacks), strict=True)).items()
    known = {id(one): one for one in stacks}
    stored = sum(times * sum(layer_bytes(known[of], layer, n, itemsize, seen, late).values()) for (layer, of), times in alike)
    return stored + turning + shape.constant


@dataclass(frozen=True)
class Budget:
    """Tokens that every layer and KV head may hold, already solved for a context (None: all stay)."""

    tokens: int | None


def check_codecs(stack: Stack, shape: ModelShape) -> None:
    """Refuse (UserError) codecs that do not fit the KV heads and layers of a model."""
    stored = stored_shape(stack.share, shape).layers
    for layer, times in Counter(layer for layer in stored if layer.window is None).items():
        for codec in (stack.keys, stack.values):
            if hasattr(codec, "check_heads"):
                codec.check_heads(layer.heads, times)


def solve_budget(stack: Stack, shape: ModelShape, context: int, itemsize: int) -> int | None:
    """Tokens per layer and head for a context of `context` tokens (None: all).

    UserError if the budget is too small, if the model stores latents and the stack needs keys and values of their own, or if a
    codec does not fit the model's heads and layers.
    """
    latents = any(one.expanded for one in shape.layers)
    check_codecs(stack, shape)
    if stack.merges and latents:
        raise UserError(
            f"compress.merge={type(stack.merge).__name__} is not possible with this model: keys and values are read from one "
            "latent, so that merged values would be other keys; legal is merge=null"
        )
    if stack.keep is not None and not isinstance(stack.keep.heads, Uniform) and latents:
        raise UserError(
            f"keep.heads={type(stack.keep.heads).__name__} is not possible with this model: all heads of a layer read one "
            "latent, so that no head can keep tokens of its own; legal is keep.heads=uniform"
        )
    return stack.budget(context, lambda n: predict(stack, shape, n, itemsize, context))


def codec_info(stack: Stack, groups: Sequence[HeadGroup], layers: Sequence[int]) -> dict[str, Any]:
    """The record's `codec_info`: the codecs' own, the share's, and what only their stores know.

    layers: those that the stack compresses. clipped: the share of clipped elements of all encoded so far. once_bytes: bases,
    codebooks and scales of all layers, which are stored once however many tokens there are; once_bytes_per_token: the same,
    divided by the tokens encoded so far.
    """
    found = {} if stack.share is None else {"share": stack.share.info()}
    for role, codec in (("keys", stack.keys), ("values", stack.values)):
        stores: list[TokenStore] = [getattr(group, role) for group in groups]
        stores = [one for one in stores if one.codec.name in {each.name for each in codecs_of(codec)} and one.written]
        info = dict(stores[0].codec.info() if stores and not isinstance(codec, ByLayer) else codec.info())
        if isinstance(codec, ByLayer):
            info["by_layer"] = list(codec.chosen(layers))
        if codec.lossy:
            info["clipped"] = sum(one.clipped for one in stores) / max(1, sum(one.written for one in stores))
        once = {id(t): t for one in stores for chunk in one.chunks for t in chunk.shared.values()}
        if once:
            size = sum(t.numel() * t.element_size() for t in once.values())
            info |= {"once_bytes": size, "once_bytes_per_token": size / max(one.n_encoded for one in stores)}
        found[role] = info
    return found
