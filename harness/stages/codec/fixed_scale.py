"""Codecs of one byte an element whose scales are constant: unit, frozen on the first tokens, or calibrated."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Limits
from harness.stages.rounding import clamp_to_range, round_up

AXES = ("channel", "head", "tensor")
SCALES = ("unit", "frozen", "calibrated")
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class FixedScale(Codec):
    """x' = s * code(x / s), one byte an element, s constant; elements outside the code range are clamped and counted.

    Tokens are independent: any can be evicted later, and new ones need no metadata.

    scale:
        "unit": s = 1;
        "frozen": s from the largest |x| of the first `first` tokens, which stay exact until all of them are there (so that
            codes do not depend on how calls were chunked);
        "calibrated": s from limits measured on calibration text.
    axis, what shares s: "channel" (of a head), "head" (of a layer), "tensor" (keys, or values, of a layer).
    Bytes per KV head: n * d, and for fp32 scales once 4 * d ("channel") or 4 ("head"; "tensor" too, which stores its scale
    once a head, as heads may be separated later); none with "unit".
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
        """Largest code."""

    @abstractmethod
    def to_codes(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, one byte each; how many were clamped, 0-d) of x / s, fp32."""

    @abstractmethod
    def from_codes(self, codes: Tensor, out: Tensor) -> None:
        """Write the codes as numbers, before the scale, into `out`."""

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
        return {"codec": self.name, "bits": 8, **axis, "scale": self.scale, **first, **about}

    def calibrated(self, limits: Limits) -> FixedScale:
        """With measured limits."""
        return replace(self, limits=limits)

    def fit(self, x_HND: Tensor, heads: Heads) -> FixedScale:
        """Fix the scales of these heads."""
        if self.scale == "unit":
            return self
        if self.scale == "frozen":
            limit_HD = x_HND[:, : self.first].float().abs().amax(1)
        elif self.limits is None:
            raise UserError(f"codec {self.name} has no calibration table; scale=frozen needs none")
        else:
            limit_HD = self.limits.of(heads, x_HND.shape[2])
        return replace(self, scale_HC=self._scales(limit_HD.cpu().double(), len(heads.layers)).to(x_HND.device))

    def of_heads(self, heads: Tensor) -> FixedScale:
        """The scales of some of its heads."""
        return self if self.scale_HC is None else replace(self, scale_HC=self.scale_HC.index_select(0, heads))

    def _scales(self, limit_HD: Tensor, layers: int) -> Tensor:
        limit_HC = limit_HD if self.axis == "channel" else limit_HD.amax(1, keepdim=True)
        if self.axis == "tensor":
            by_layer = limit_HC.view(layers, -1)
            limit_HC = by_layer.amax(1, keepdim=True).expand_as(by_layer).reshape(-1, 1)
        scale = round_up(limit_HC / self.top, torch.float32)
        return scale.clamp(min=TINY)  # a channel of zeros: later non-zero elements are clamped and counted

    def encode(self, x_HND: Tensor) -> Encoded:
        x, shared = x_HND.float(), {}
        if self.scale != "unit":
            assert self.scale_HC is not None, "fit comes before encode"
            x, shared = x / self.scale_HC[:, None], {"scale": self.scale_HC}
        codes, clipped = self.to_codes(x)
        return Encoded({"codes": codes}, {}, int(x_HND.shape[1]), shared, clipped)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        self.from_codes(e.payload["codes"], out_HND)
        if e.shared:
            out_HND.mul_(e.shared["scale"][:, None])
        clamp_to_range(out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        constants = 0 if self.scale == "unit" or not n else d if self.axis == "channel" else 1
        return h * n * d, 4 * h * constants
