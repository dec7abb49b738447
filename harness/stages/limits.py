"""Calibration of codecs with constant scales: on which text |x| is measured, and the limits found.

`harness.calibrate.codec_limits` does the measuring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.encoded import Heads
from harness.types import Corpus


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Text on which limits are measured, and how much of the distribution they cover.

    corpus: the text; choose another one than the task's, or the scales have seen the test.
    tokens: read from its start, in windows of `window` tokens that each begin like a prompt (with BOS, if any).
    percentile: of |x| over those tokens, by nearest rank; 100 is the largest.
    table: SHA-256 of the measured limits, filled in and recorded by a run; if given, the measured limits must have it.
    """

    corpus: Corpus
    tokens: int = 8192
    window: int = 2048
    percentile: float = 100.0
    table: str | None = None

    def __post_init__(self) -> None:
        for key in ("tokens", "window"):
            value = getattr(self, key)
            require(isinstance(value, int) and value > 0, f"codec.calibration.{key}", value, "a positive number of tokens")
        ok = isinstance(self.percentile, (int, float)) and 90 <= self.percentile <= 100
        require(ok, "codec.calibration.percentile", self.percentile, "a number from 90 to 100")


@dataclass(frozen=True)
class Limits:
    """Largest |x| to encode, fp32 [h, D] for the h KV heads of each layer. about: where they were measured, for the record."""

    by_layer: Mapping[int, Tensor]
    about: Mapping[str, object] = field(default_factory=dict)

    def of(self, heads: Heads, d: int) -> Tensor:
        """Limits [H, D] of these heads, layer by layer; UserError if they do not fit."""
        missing = [layer for layer in heads.layers if layer not in self.by_layer]
        if missing:
            raise UserError(f"the calibration table has no layer {missing[0]}")
        found = torch.cat([self.by_layer[layer][heads.start : heads.stop] for layer in heads.layers])
        if tuple(found.shape) != (heads.n, d):
            raise UserError(f"the calibration table holds {tuple(found.shape)} limits for {heads.n} heads of {d} channels")
        return found
