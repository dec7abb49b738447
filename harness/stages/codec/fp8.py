"""Eight-bit floats; it knows nothing of eviction or of where rows or limits come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.codec.fixed_scale import FixedScale
from harness.stages.codec.packing import head_blocks

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Float8(FixedScale):
    """x' = s * fp8(clamp(x / s, -max, max)), max 448 (e4m3) or 57344 (e5m2), s = limit / max.

    An element inside the limit is off by at most 1/16 (e4m3) or 1/8 (e5m2) of itself, or half of the smallest subnormal
    (s * 2^-10, s * 2^-17). Keys and values have scales of their own. The variants people run: one unit scale (serving engines
    without a calibrated checkpoint), one frozen scale a head or tensor from the first rows, a calibrated one.
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
        # Stored as plain bytes: rows of them can be joined and picked on every device.
        return ratio.clamp(-self.top, self.top).to(FORMATS[self.format]).view(torch.uint8), clipped

    def from_codes(self, codes: Tensor, out: Tensor) -> None:
        if self.format == "e5m2":
            out.copy_(codes.view(torch.float8_e5m2))
            return
        # torch's own e4m3 conversion takes four times as long as int8's on a CPU. Sign, exponent and mantissa moved to their
        # places in a float16 are the number times 2^-8, for the exponent's bias is 15 there and 7 here.
        for some in head_blocks(out):
            bits = (codes[some].view(torch.int8).to(torch.int16) << 7).bitwise_and_(-0x4001)
            out[some] = bits.view(torch.float16)
            out[some].mul_(256)
