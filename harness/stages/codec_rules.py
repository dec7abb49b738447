"""What codecs must give, and what they do not go together with: evictions of what they encode, keys that queries do not fit."""

from __future__ import annotations

from harness.errors import UserError
from harness.stages.codec.base import Codec
from harness.stages.encoded import Encoded, Heads
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.keep import Keep
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.score.recency import Recency


def check_aligned(role: str, codec: Codec, keep: Keep) -> None:
    """Refuse (UserError) a codec whose heads must hold the same tokens beside a keep that lets them choose."""
    same = isinstance(keep.scorer, Recency) and isinstance(keep.heads, UniformHeads) and isinstance(keep.layers, UniformLayers)
    if getattr(codec, "aligned", False) and not same:
        raise UserError(
            f"compress.{role}={codec.name} with keep.scorer={type(keep.scorer).__name__} is not possible: heads that share "
            "coefficients must hold the same tokens; legal are a keep by position, the same in all heads and layers (window, "
            "streaming), or low_rank with codec.heads=1"
        )


def check_evicted(role: str, codec: Codec, phase: str, sinks: int) -> None:
    """Refuse (UserError) a codec for "keys" or "values" whose encoded tokens cannot be evicted one by one.

    phase: one that evicts them. sinks: first tokens that no eviction takes.
    """
    if codec.joint:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}={codec.name} is not possible: heads encoded together would lose "
            "different tokens; legal are phase=prefill (evict, then encode), or int8, turboquant"
        )
    if codec.sinks > sinks:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}.sinks={codec.sinks} is not possible: keep.sinks={sinks} would "
            f"evict exact first tokens; legal are keep.sinks >= {codec.sinks} or phase=prefill"
        )
    if codec.block > 1:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}={codec.name} is not possible: it would evict single tokens of "
            f"blocks of {codec.block} tokens that share a scale; legal are phase=prefill (evict, then encode), a scale per "
            f"token ({role}.axis=token where the codec has it, int8, hadamard_int4), or one that never changes (int8_static, "
            "fp8_e4m3)"
        )


def check_queries(keys: Codec, values: Codec, *, unrotated: bool, chunked: bool) -> None:
    """Refuse (UserError) codecs that look at queries where these do not fit what is stored, or come too early.

    unrotated: keys are stored before RoPE. chunked: the context is compressed while it is read.
    """
    if values.needs:
        raise UserError(f"compress.values={values.name} is not possible: it compares keys with queries")
    if keys.needs and unrotated:
        raise UserError(
            f"compress.keys={keys.name} compares keys with queries after RoPE: legal are positions=original and rope=post"
        )
    if keys.needs and chunked:
        raise UserError(
            f"compress.phase='chunked' with compress.keys={keys.name} is not possible: it looks at the last queries of a whole "
            "context; legal are phase=prefill, always or every_n"
        )


def check_encoded(new: Encoded, codec: Codec, heads: Heads, n: int) -> None:
    """ValueError if a codec's tensors lack axes of heads and tokens: they would be indexed wrongly later."""
    lengths = sorted({n, n // codec.block})
    firsts = {heads.n, len(heads.layers)} if getattr(codec, "joint", False) else {heads.n}
    for name, tensor in {**new.payload, **new.metadata}.items():
        if tensor.shape[0] not in firsts or tensor.shape[1] not in lengths or new.n != n:
            raise ValueError(
                f"codec {codec.name} encoded {n} tokens of {heads.n} heads (Encoded.n={new.n}) with {name!r} of shape "
                f"{tuple(tensor.shape)}: its first two axes must be heads ({heads.n}) and tokens or blocks ({lengths})"
            )
    for name, tensor in new.shared.items():
        if tensor.shape[0] not in firsts:
            shape = tuple(tensor.shape)
            raise ValueError(f"codec {codec.name} shares {name!r} of shape {shape}: its first axis must be heads ({heads.n})")
