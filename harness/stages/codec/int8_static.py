"""Symmetric int8 under constant scales; it knows nothing of eviction or of where rows or limits come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.codec.fixed_scale import FixedScale

LIMIT = 127


@dataclass(frozen=True, kw_only=True)
class Int8Static(FixedScale):
    """q = clamp(round(x / s), -127, 127), s = limit / 127, by default per layer, head and channel from calibration text.

    An element inside the limit is off by at most s / 2. Half the bytes of a 16-bit cache: 2.00x. Keys are rotated when
    measured, as they are when stored, so a channel's limit holds for its rotation partner too.
    """

    name: str = "int8_static"
    scale: str = "calibrated"
    axis: str = "channel"

    @property
    def top(self) -> float:
        return float(LIMIT)

    def to_codes(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        codes = ratio.round()
        clipped = (codes.abs() > LIMIT).sum()
        return codes.clamp_(-LIMIT, LIMIT).to(torch.int8), clipped

    def from_codes(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes)
