"""Symmetric int8 with one dynamic scale per token and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.codec.base import Codec
from harness.stages.codec.packing import head_blocks
from harness.stages.encoded import Encoded
from harness.stages.rounding import clamp_to_range, round_up

LIMIT = 127


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """q = clamp(round(x / s), -127, 127), s = max|x| / 127 over the channels of a token, rounded up in the cache dtype.

    The usual dynamic int8, of no single paper (kvpress: none). Tokens are independent: any can be evicted later, and codes do
    not depend on how calls were chunked.
    Bytes: n * (d + itemsize) per KV head; 1.94x at head_dim 64 against a 16-bit cache.
    """

    name: str = "int8"

    @property
    def by_tokens(self) -> bool:
        return True

    def info(self) -> dict[str, object]:
        return {"codec": self.name, "bits": 8, "axis": "token", "scale": "dynamic", "clipped": 0.0}

    def encode(self, x_HND: Tensor) -> Encoded:
        codes = torch.empty(x_HND.shape, dtype=torch.int8, device=x_HND.device)
        scale_HN1 = x_HND.new_empty(*x_HND.shape[:2], 1)
        for some in head_blocks(x_HND):
            x = x_HND[some].float()
            scale_HN1[some] = round_up(x.abs().amax(-1, keepdim=True) / LIMIT, x_HND.dtype)
            divisor = scale_HN1[some].float().masked_fill(scale_HN1[some] == 0, 1.0)  # all zeros decode to exactly 0
            codes[some] = (x / divisor).round_().clamp_(-LIMIT, LIMIT)
        return Encoded({"codes": codes}, {"scale": scale_HN1}, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        out_HND.copy_(e.payload["codes"]).mul_(e.metadata["scale"])
        clamp_to_range(out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * d, h * n * itemsize
