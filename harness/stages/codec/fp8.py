"""FP8: 8-bit floats, e4m3 and e5m2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.codec.fixed_scale import FixedScale
from harness.stages.codec.small_floats import read_e4m3

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Float8(FixedScale):
    """x' = s * fp8(clamp(x / s, -max, max)), max = 448 (e4m3) or 57344 (e5m2), s = limit / max. Formats: arXiv 2209.05433.

    Error of an element inside the limit: at most 1/16 (e4m3) or 1/8 (e5m2) of it, or half of the smallest subnormal (s * 2^-10,
    s * 2^-17). Keys and values have separate scales.

    scale: "unit" is vLLM's kv_cache_dtype=fp8 without a calibrated checkpoint; "frozen" is close to transformers' own fp8
    cache (scale of the first update); "calibrated" with axis=tensor is vLLM's k_scale, v_scale. kvpress: none.
    """

    name: str = "fp8_e4m3"
    format: str = "e4m3"
    scale: str = "frozen"
    axis: str = "head"

    def __post_init__(self) -> None:
        require(self.format in FORMATS, "codec.format", self.format, f"allowed are {', '.join(FORMATS)}")
        super().__post_init__()

    def info(self) -> dict[str, object]:
        return {**super().info(), "format": self.format}

    @property
    def top(self) -> float:
        return float(torch.finfo(FORMATS[self.format]).max)

    def to_codes(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        clipped = (ratio.abs() > self.top).sum()
        # Stored as uint8: not every device can concatenate and index fp8 tensors.
        return ratio.clamp(-self.top, self.top).to(FORMATS[self.format]).view(torch.uint8), clipped

    def from_codes(self, codes: Tensor, out: Tensor) -> None:
        if self.format == "e5m2":
            out.copy_(codes.view(torch.float8_e5m2))
            return
        read_e4m3(codes, out)
