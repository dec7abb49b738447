"""Calibration of codecs with constant scales or codebooks: on which text, and what was found.

`harness.calibrate.codec_limits` measures limits, `harness.calibrate.codebooks` fits codebooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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


@dataclass(frozen=True)
class Codebooks(Limits):
    """A range for every channel, and a codebook for every layer: by_layer is then the upper end of the range.

    low: the lower end, fp32 [h, D]. points: fp32 [P], ascending, of numbers brought to -1 .. 1.
    """

    low: Mapping[int, Tensor] = field(default_factory=dict)
    points: Mapping[int, Tensor] = field(default_factory=dict)

    def range(self, heads: Heads, d: int) -> tuple[Tensor, Tensor]:
        """(lower, upper) ends [H, D] of these heads."""
        return Limits(self.low).of(heads, d), self.of(heads, d)

    def points_of(self, heads: Heads) -> Tensor:
        """Codebooks [layers, P]."""
        return torch.stack([self.points[layer] for layer in heads.layers])


class Fitting(Protocol):
    """How a codec fits a codebook: `size` points to a histogram of its numbers brought to -1 .. 1.

    share: of the numbers of a channel that its range leaves out; None if channels have no ranges. skip: first tokens of a
    window that are not measured. weights: "plain", every number counts alike, or "fisher", by its squared gradient.
    settings: all else that `units` depends on, for the address of what was measured.
    """

    @property
    def size(self) -> int: ...

    @property
    def share(self) -> float | None: ...

    @property
    def skip(self) -> int: ...

    @property
    def weights(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, object]: ...

    def units(
        self, x_HND: Tensor, low_HD: Tensor | None = None, high_HD: Tensor | None = None, fisher_HND: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The numbers of one layer that a codebook is for, brought to -1 .. 1 and flat; what is stored exactly is left out.

        fisher_HND: squared gradients with respect to x. Also returns what the squared error of each number counts, given them.
        """
        ...
