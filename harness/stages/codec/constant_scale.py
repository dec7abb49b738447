"""Constant scales: unit, frozen on the first tokens, or calibrated."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.encoded import Heads
from harness.stages.limits import Calibration, Limits
from harness.stages.rounding import divide_up

AXES = ("channel", "head", "tensor")
SCALES = ("unit", "frozen", "calibrated")
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class ConstantScale(Codec):
    """x' = s * code(x / s) with a constant s, fp32; elements outside the code range are clamped and counted.

    Tokens are independent: any can be evicted later, and new ones need no other constant.

    scale:
        "unit": s = 1;
        "frozen": s from the largest |x| of the first `first` tokens, which stay exact until all of them are there (so that
            codes do not depend on how calls were chunked);
        "calibrated": s from limits measured on calibration text.
    axis, what shares s: "channel" (of a head), "head" (of a layer), "tensor" (keys, or values, of a layer).
    Bytes of s per KV head, once: 4 * d ("channel") or 4 ("head"; "tensor" too, which stores its scale once a head, as heads may
    be separated later); none with "unit".
    """

    name: str
    scale: str
    axis: str
    first: int = 32
    sinks: int = 0
    calibration: Calibration | None = read_as(lambda codec, given: given if codec.scale == "calibrated" else None, None)
    limits: Limits | None = field(default=None, repr=False, compare=False)  # set by `calibrated`
    scale_HC: Tensor | None = field(default=None, repr=False, compare=False)  # set by `fit`

    def __post_init__(self) -> None:
        require(self.scale in SCALES, "codec.scale", self.scale, f"allowed are {', '.join(SCALES)}")
        require(self.axis in AXES, "codec.axis", self.axis, f"allowed are {', '.join(AXES)}")
        require(isinstance(self.first, int) and self.first > 0, "codec.first", self.first, "a positive number of tokens")
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "codec.sinks", self.sinks, "a number of first tokens that stay exact, 0 or more")
        if self.scale == "calibrated":
            require(self.calibration is not None, "codec.calibration", None, "codec.scale=calibrated needs it")

    @property
    @abstractmethod
    def top(self) -> float:
        """Largest number, in units of s."""

    def leaving(self, tail: int, encoded: int) -> int:
        """All of them; under scale=frozen none before `first` are there."""
        return 0 if self.scale == "frozen" and not encoded and tail < self.first else tail

    @property
    def by_tokens(self) -> bool:
        return True

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.limits.about)} if self.limits else {}
        first = {"first": self.first} if self.scale == "frozen" else {}
        axis = {} if self.scale == "unit" else {"axis": self.axis}
        first |= {"sinks": self.sinks} if self.sinks else {}
        return {"codec": self.name, **axis, "scale": self.scale, **first, **about}

    def calibrated(self, limits: Limits) -> ConstantScale:
        """With measured limits."""
        return replace(self, limits=limits)

    def fit(self, x_HND: Tensor, heads: Heads) -> ConstantScale:
        """Fix the scales of these heads."""
        if self.scale == "unit":
            return self
        if self.scale == "frozen":
            limit_HD = x_HND[:, : self.first].float().abs().amax(1)
        elif self.limits is None:
            raise UserError(f"codec {self.name} has no calibration table; scale=frozen needs none")
        else:
            limit_HD = self.limits.of(heads, x_HND.shape[2])
        return replace(self, scale_HC=self._scales(limit_HD, len(heads.layers)).to(x_HND.device))

    def of_heads(self, heads: Tensor) -> ConstantScale:
        """The scales of some of its heads."""
        return self if self.scale_HC is None else replace(self, scale_HC=self.scale_HC.index_select(0, heads))

    def _scales(self, limit_HD: Tensor, layers: int) -> Tensor:
        limit_HC = limit_HD if self.axis == "channel" else limit_HD.amax(1, keepdim=True)
        if self.axis == "tensor":
            by_layer = limit_HC.view(layers, -1)
            limit_HC = by_layer.amax(1, keepdim=True).expand_as(by_layer).reshape(-1, 1)
        scale_HC = divide_up(limit_HC, self.top)
        return scale_HC.clamp(min=TINY)  # a channel of zeros: later non-zero elements are clamped and counted

    def shared(self) -> dict[str, Tensor]:
        """The scales [H, C] of these heads, as every `Encoded` holds them; nothing under scale=unit."""
        if self.scale == "unit":
            return {}
        assert self.scale_HC is not None, "fit comes before encode"
        return {"scale": self.scale_HC}

    def shared_bytes(self, h: int, n: int, d: int) -> int:
        """Bytes of the scales of h heads that hold n encoded tokens."""
        return 0 if self.scale == "unit" or not n else 4 * h * (d if self.axis == "channel" else 1)
