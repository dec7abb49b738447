"""No quantization: keys and values in the cache dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.stages.codec.base import Codec
from harness.stages.encoded import Encoded


@dataclass(frozen=True, kw_only=True)
class Exact(Codec):
    """x' = x. Bytes: n * d * itemsize per KV head."""

    name: str = "exact"

    @property
    def lossy(self) -> bool:
        return False

    @property
    def by_tokens(self) -> bool:
        return True

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"tokens": x_HND}, {}, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        out_HND.copy_(e.payload["tokens"])

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * d * itemsize, 0
