"""Codecs of one byte an element whose scales are constant."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from harness.stages.codec.constant_scale import ConstantScale
from harness.stages.codec.packing import head_blocks
from harness.stages.encoded import Encoded
from harness.stages.rounding import clamp_to_range


@dataclass(frozen=True, kw_only=True)
class FixedScale(ConstantScale):
    """One byte an element. Bytes per KV head: n * d, and the scales once."""

    @abstractmethod
    def to_codes(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, one byte each; how many were clamped, 0-d) of x / s, fp32."""

    @abstractmethod
    def from_codes(self, codes: Tensor, out: Tensor) -> None:
        """Write the codes as numbers, before the scale, into `out`."""

    def info(self) -> dict[str, object]:
        return {**super().info(), "bits": 8}

    def encode(self, x_HND: Tensor) -> Encoded:
        n, shared, parts = int(x_HND.shape[1]), self.shared(), list[Encoded]()
        for some in head_blocks(x_HND):
            x = x_HND[some].float()
            codes, clipped = self.to_codes(x / shared["scale"][some, None] if shared else x)
            parts.append(Encoded({"codes": codes}, {}, n, clipped=clipped))
        return replace(Encoded.stack(parts), shared=shared)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        self.from_codes(e.payload["codes"], out_HND)
        if e.shared:
            out_HND.mul_(e.shared["scale"][:, None])
        clamp_to_range(out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * d, self.shared_bytes(h, n, d)
