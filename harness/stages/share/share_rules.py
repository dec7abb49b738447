"""Which stacks sharing is legal in: refused with the reason and what is legal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.stages.codec.by_layer import ByLayer
from harness.stages.heads.uniform_heads import Uniform as UniformHeads

if TYPE_CHECKING:
    from harness.stages.codec.base import Codec
    from harness.stages.share.sharing import Share
    from harness.stages.stack import Stack


def check(stack: Stack, share: Share) -> None:
    """Refuse (UserError) what cannot be stored or read right."""
    for rule in (_by_layer, _bases, _codecs, _merged, _aligned, _folded, _lists):
        for reason in rule(stack, share):
            raise UserError(f"compress.share={type(share).__name__} {reason}")


def _by_layer(stack: Stack, share: Share) -> Sequence[str]:
    mixed = [(role, codec) for role, codec in _both(stack) if isinstance(codec, ByLayer)]
    if not share.pools:
        return [
            f"with compress.{role}={codec.name} is not possible: layers that share a store cannot have codecs of their own; "
            "legal are one codec for all layers, or heads that share (pooled_heads, aligned_heads, one_latent)"
            for role, codec in mixed
        ]
    return [
        f"with compress.{role}={codec.name} is not possible: the order of layers is measured on single heads, and others are "
        f"stored; legal are {role}.layers=first, last or a list"
        for role, codec in mixed
        if codec.calibration is not None
    ]


def _bases(stack: Stack, share: Share) -> Sequence[str]:
    xkv = share.pools and not share.folds
    return [
        f"with compress.{role}={codec.name} is not possible: its basis is of the model's own layers and heads, and others are "
        f"stored; legal are {'xkv, whose basis is of what is stored, and ' * xkv}codecs that encode each head by itself"
        for role, codec in _both(stack)
        if (codec.span is not None and (share.pools or share.merges or share.folds))
        or ((share.merges or share.folds) and getattr(codec, "layers_together", 1) > 1)
    ]


def _codecs(stack: Stack, share: Share) -> Sequence[str]:
    return [
        f"with compress.{role}={codec.name} is not possible: its constants are calibrated on the keys and values of single "
        "heads and layers, and others are stored; legal are codecs whose scales are dynamic or frozen on the first tokens"
        for role, codec in _both(stack)
        if codec.calibration is not None and (share.pools or share.merges)
    ]


def _both(stack: Stack) -> Sequence[tuple[str, Codec]]:
    return (("keys", stack.keys), ("values", stack.values))


def _merged(stack: Stack, share: Share) -> Sequence[str]:
    if not share.merges:
        return []
    found = []
    if stack.keep is not None:
        found.append(
            "with a keep is not possible: two layers have one direction a token, and would keep different tokens; legal are "
            "keep=null, or layers that read another's store (adjacent_layers, similar_layers)"
        )
    if stack.keys.needs:
        found.append(
            f"with compress.keys={stack.keys.name} is not possible: it chooses by the queries of one layer, and two read a "
            "direction; legal are codecs that look at keys alone"
        )
    if stack.read == "cached":
        found.append(
            "with compress.read='cached' is not possible: no decoded copy of merged layers is kept; legal is every_step"
        )
    return found


def _aligned(stack: Stack, share: Share) -> Sequence[str]:
    if not share.aligned:
        return []
    found = []
    if stack.unrotated:
        found.append(
            f"with compress.positions={stack.positions!r} and rope={stack.rope!r} is not possible: its matrices do not commute "
            "with rotations, so that keys are stored as they were turned; legal are original and post, or pooled_heads"
        )
    if stack.needs.query_moments:
        found.append(
            "with a scorer that predicts queries is not possible: they are predicted before RoPE, and heads are aligned after "
            "it; legal are other scorers, or pooled_heads"
        )
    if stack.keep is not None and not isinstance(stack.keep.heads, UniformHeads):
        found.append(
            "with budgets that differ by head is not possible: its matrices are a layer's; legal is keep.heads=uniform"
        )
    return found


def _folded(stack: Stack, share: Share) -> Sequence[str]:
    if not share.folds:
        return []
    found = []
    if stack.keep is not None:
        found.append(
            "with a keep is not possible: scorers look at keys with all of their rotation, and part of these has none; legal "
            "is keep=null"
        )
    if stack.unrotated:
        found.append(
            f"with compress.positions={stack.positions!r} and rope={stack.rope!r} is not possible: it says itself which part "
            "of the keys is stored rotated; legal are original and post"
        )
    if stack.keys.needs:
        found.append(
            f"with compress.keys={stack.keys.name} is not possible: it compares queries with keys, and part of these is in the "
            "latent; legal are codecs that look at what is stored alone"
        )
    return found


def _lists(stack: Stack, share: Share) -> Sequence[str]:
    splits = () if stack.keep is None else (("heads", stack.keep.heads), ("layers", stack.keep.layers))
    return [
        f"with keep.{name}={type(split).__name__} is not possible: its list names the model's heads, and they share stores; "
        "legal are splits without a list"
        for name, split in splits
        if hasattr(split, "file")
    ]
