"""What codecs do not go together with: evictions of what they encoded, and keys that their queries do not fit."""

from __future__ import annotations

from harness.errors import UserError
from harness.stages.codec.base import Codec


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
