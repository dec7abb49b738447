"""What a plan warns of: bytes that fit say nothing about quality or speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.kv.shape import ModelShape
from harness.planning.fits import Room
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import codecs_of
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.int8_static import Int8Static
from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.codec.over_inner import OverInner
from harness.stages.score.recency import Recency
from harness.stages.stack import Stack

FP8 = "FP8"


def of_room(room: Room) -> Iterator[str]:
    """About the memory, whatever the stack."""
    if room.bytes <= 0:
        yield (
            f"the parameters alone ({room.parameters / 2**30:.1f} GiB) do not fit on {room.number} x {room.gpu.name}: "
            "compressing the cache does not help; take more of them, a larger one, or quantized weights"
        )


def of_length(tokens: int, positions: int | None) -> Iterator[str]:
    """About the length, whatever the stack."""
    if positions is not None and tokens > positions:
        yield f"{tokens} tokens are more than the {positions} positions the model was built for"


def of_stack(stack: Stack, shape: ModelShape, rooms: Sequence[Room]) -> Iterator[str]:
    """About one stack on this model."""
    codecs = [codec for role in (stack.keys, stack.values) for codec in _inside(role)]
    gpus = [room.gpu for room in rooms]
    for word in dict.fromkeys(filter(None, map(_floats, codecs))):
        slow = [gpu.name for gpu in gpus if not (gpu.fp8 if word == FP8 else gpu.fp4)]
        if slow:
            yield f"{', '.join(slow)} do not compute in {word}: the bytes are saved, but every read converts"
    if any(isinstance(codec, Int8Static) and codec.scale != "calibrated" for codec in codecs):
        yield "int8 with scales that were not measured on text: values beyond them are clipped"
    keep = stack.keep
    if keep is None:
        return
    if isinstance(keep.scorer, Recency) and not keep.sinks and all(layer.window is None for layer in shape.layers):
        yield "a window on a model trained with full attention: without sinks its perplexity collapses past the window"
    yield "evicted tokens are gone: exact recall (quotes, keys, code) suffers first"
    if not stack.chunked:
        yield "the whole context is held once, exact, before it is compressed: that peak must fit too; phase=chunked bounds it"


def _inside(codec: Codec) -> Iterator[Codec]:
    """A codec, or those that it chooses from by layer, and what stores the numbers that these make of keys or values."""
    for one in codecs_of(codec):
        yield one
        if isinstance(one, OverInner):
            yield from _inside(one.inner)


def _floats(codec: Codec) -> str | None:
    """What the small floats of a codec are called; None if it stores none."""
    if isinstance(codec, MxFloat):
        return f"MXFP{codec.bits}"
    return FP8 if isinstance(codec, Float8) else "NVFP4" if isinstance(codec, NvFloat4) else None
