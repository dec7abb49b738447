"""Symmetric int8 with constant, by default calibrated, scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.codec.fixed_scale import FixedScale

LIMIT = 127


@dataclass(frozen=True, kw_only=True)
class Int8Static(FixedScale):
    """q = clamp(round(x / s), -127, 127), s = limit / 127, by default per layer, KV head and channel (kvpress: none).

    The usual static int8, of no single paper; limits are max |x| (or a percentile) over calibration text. An element inside
    the limit is off by at most s / 2. 2.00x against a 16-bit cache. Keys are measured and stored after RoPE, which mixes pairs
    of channels, so the two limits of a pair are alike.
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
