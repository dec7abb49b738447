"""Which codecs go with which keep and phase: what cannot work is refused with the reason and what is legal."""

from __future__ import annotations

from harness.errors import UserError
from harness.stages.codec.base import Codec
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.keep import Keep
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.score.recency import Recency


def check_codec(role: str, codec: Codec, keep: Keep, phase: str) -> None:
    """Raise UserError if the codec of "keys" or "values" cannot store what a keep leaves, or be evicted from in this phase."""
    even = isinstance(keep.heads, UniformHeads) and isinstance(keep.layers, UniformLayers)
    if getattr(codec, "aligned", False) and not (even and isinstance(keep.scorer, Recency)):
        raise UserError(
            f"compress.{role}={codec.name} with keep.scorer={type(keep.scorer).__name__} is not possible: heads that share "
            "coefficients must hold the same tokens; legal are a keep by position, the same in all heads and layers (window, "
            "streaming), or low_rank with codec.heads=1"
        )
    if phase == "prefill":
        return
    if codec.joint:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}={codec.name} is not possible: heads encoded together "
            "would lose different tokens; legal are phase=prefill (evict, then encode), or int8, turboquant"
        )
    if codec.sinks > keep.sinks:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}.sinks={codec.sinks} is not possible: keep.sinks="
            f"{keep.sinks} would evict exact first tokens; legal are keep.sinks >= {codec.sinks} or phase=prefill"
        )
    if codec.block > 1:
        raise UserError(
            f"compress.phase={phase!r} with compress.{role}={codec.name} is not possible: it would evict "
            f"single tokens of blocks of {codec.block} tokens that share a scale; legal are phase=prefill (evict, then "
            f"encode), a scale per token ({role}.axis=token where the codec has it, int8, hadamard_int4), or one "
            "that never changes (int8_static, fp8_e4m3)"
        )
