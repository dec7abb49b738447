"""Hadamard rotation before another codec (QuaRot): outlier channels are spread over all channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.codec.over_inner import OverInner
from harness.stages.codec.packing import head_blocks
from harness.stages.codec.tiled import tiled_product
from harness.stages.encoded import Encoded, Heads
from harness.stages.rounding import clamp_to_range, in_range


@dataclass(frozen=True, kw_only=True)
class Hadamard(OverInner):
    """QuaRot's KV cache (arXiv 2404.00456; kvpress: none): y = x H / sqrt(d) is encoded by `inner`, x' = y' H / sqrt(d).

    H is Sylvester's Hadamard matrix of size d: H / sqrt(d) is symmetric and orthogonal, so it undoes itself, keeps the length
    of the quantization error, and is not stored. Keys are rotated after RoPE, as in the paper.

    Differs from the authors' code: it rotates queries too and fuses the values' rotation into weights; here decoding rotates
    back, which gives the same attention. Products are made in tiles of one size: their bits do not depend on which tokens come
    together. y is rounded to the cache dtype (elements beyond float16 are clamped and counted).
    Tokens that stay exact are not rotated.
    """

    inner: Codec
    name: str = read_as(lambda codec, given: given or f"hadamard_{codec.inner.name}", "")

    def __post_init__(self) -> None:
        require(self.inner.calibration is None, "codec.inner", self.inner.name, "calibrated limits have no rotation")

    @property
    def by_tokens(self) -> bool:
        return self.inner.by_tokens

    @property
    def residual(self) -> int:
        return self.inner.residual

    @property
    def sinks(self) -> int:
        return self.inner.sinks

    def leaving(self, tail: int, encoded: int) -> int:
        return self.inner.leaving(tail, encoded)

    def info(self) -> dict[str, object]:
        return {**self.inner.info(), "codec": self.name, "rotation": "hadamard"}

    def check(self, head_dim: int) -> None:
        """head_dim must be a power of two, and the inner codec must agree."""
        if head_dim & (head_dim - 1):
            raise UserError(f"codec {self.name} is not possible with head_dim {head_dim}: it must be a power of two")
        self.inner.check(head_dim)

    def for_role(self, role: str) -> Hadamard:
        return replace(self, inner=self.inner.for_role(role))

    def fit(self, x_HND: Tensor, heads: Heads) -> Hadamard:
        return replace(self, inner=self.inner.fit(_rotated(x_HND)[0], heads))

    def of_heads(self, heads: Tensor) -> Hadamard:
        return replace(self, inner=self.inner.of_heads(heads))

    def encode(self, x_HND: Tensor) -> Encoded:
        y, clipped = _rotated(x_HND)
        e = self.inner.encode(y)
        return replace(e, clipped=e.clipped + clipped)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        h_DD = matrix(out_HND.shape[2], out_HND.dtype, out_HND.device)
        for some in head_blocks(out_HND):
            out = out_HND[some]
            self.inner.decode(e.heads(some.start, some.stop), out)
            rotated = tiled_product(out, h_DD)
            clamp_to_range(rotated)
            out.copy_(rotated)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return self.inner.nbytes(h, n, d, itemsize)


@lru_cache
def matrix(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H / sqrt(d), [D, D], with H(1) = 1, H(2k) = [[H, H], [H, -H]]."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < d:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (h / math.sqrt(d)).to(dtype).to(device)


def _rotated(x_HND: Tensor) -> tuple[Tensor, Tensor | int]:
    """(x H / sqrt(d) in x's dtype, number of elements clamped to the range of float16)."""
    y_HND, clipped = torch.empty_like(x_HND), list[Tensor | int]()
    h_DD = matrix(x_HND.shape[2], torch.float32, x_HND.device)
    for some in head_blocks(x_HND):
        y_HND[some], beyond = in_range(tiled_product(x_HND[some].float(), h_DD), x_HND.dtype)
        clipped.append(beyond)
    return y_HND, sum(clipped)
