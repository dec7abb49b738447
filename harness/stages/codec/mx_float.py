"""MXFP4 and MXFP8: small floats under a power of two for every few channels of a token (OCP Microscaling formats)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.codec.base import Codec
from harness.stages.codec.packing import head_blocks, packed_width
from harness.stages.codec.small_floats import EXPONENT, coded, looked_up_powers, numbers
from harness.stages.encoded import Encoded
from harness.stages.rounding import clamp_to_range


@dataclass(frozen=True, kw_only=True)
class MxFloat(Codec):
    """x' = 2^k f, f = e2m1 or e4m3 of x / 2^k, k = floor(log2 max|x|) - 2 or - 8 over `group` channels of one token.

    Formats: OCP Microscaling specification 1.0; arXiv 2310.10537 (kvpress: none). 2^k is stored as a byte (e8m0),
    k from -127 to 127. As k is rounded down, the largest elements of a group may lie beyond what f reaches (below 8 instead of
    6, or 512 instead of 448) and saturate. An element is off by at most 1/5 of itself or 2^k / 4 (bits 4), 1/16 or 2^k / 1024
    (bits 8); one that saturates by more than rounding is counted as clipped, and off by at most 1/4 or 1/8.
    Tokens are independent: any can be evicted later, and codes do not depend on how calls were chunked.

    bits: 4, elements are e2m1; 8, they are e4m3.
    group: 32 in the specification; SGLang's fp4_e2m1 cache has 16.
    sinks: first tokens that stay exact.
    Bytes of a token per KV head: packed_width(d, bits) + d / group; 4.25 and 8.25 bits an element with groups of 32.
    """

    name: str = "mxfp4"
    bits: int = 4
    group: int = 32
    sinks: int = 0

    def __post_init__(self) -> None:
        require(self.bits in EXPONENT, "codec.bits", self.bits, "allowed are 4 (e2m1) and 8 (e4m3)")
        require(isinstance(self.group, int) and self.group > 1, "codec.group", self.group, "an integer of at least 2")
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "codec.sinks", self.sinks, "a number of first tokens that stay exact, 0 or more")

    @property
    def by_tokens(self) -> bool:
        return True

    def info(self) -> dict[str, object]:
        sinks = {"sinks": self.sinks} if self.sinks else {}
        return {"codec": self.name, "bits": self.bits, "axis": "token", "group": self.group, **sinks, "scale": "dynamic"}

    def check(self, head_dim: int) -> None:
        """The group must divide head_dim."""
        check_group(self.group, head_dim)

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded.stack([self._encoded(x_HND[some]) for some in head_blocks(x_HND)])

    def _encoded(self, x_HND: Tensor) -> Encoded:
        groups_HNGE = x_HND.float().view(*x_HND.shape[:2], -1, self.group)
        largest = groups_HNGE.abs().amax(-1)
        exponent = largest.view(torch.int32) >> 23  # floor(log2) + 127, the bits that fp32 keeps it in
        scale_HNG = (exponent - EXPONENT[self.bits]).clamp_(0, 254)
        ratio = groups_HNGE * looked_up_powers(254 - scale_HNG)[..., None]  # times 2^-k, which is exact
        codes, clipped = coded(ratio.flatten(2), self.bits)
        return Encoded({"codes": codes}, {"scale": scale_HNG.to(torch.uint8)}, int(x_HND.shape[1]), clipped=clipped)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        write_scaled(e.payload["codes"], looked_up_powers(e.metadata["scale"]), self.bits, out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * packed_width(d, self.bits), h * n * (d // self.group)


def check_group(group: int, head_dim: int) -> None:
    """Refuse (UserError) a number of channels that does not divide the head dim."""
    divisors = [g for g in range(2, head_dim + 1) if head_dim % g == 0]
    require(head_dim % group == 0, "codec.group", group, f"it must divide head_dim {head_dim}: allowed are {divisors}")


def write_scaled(codes_HNP: Tensor, scale_HNG: Tensor, bits: int, out_HND: Tensor) -> None:
    """Decode small floats under the fp32 scale of their group, in fp32, and write them in out's dtype."""
    for some in head_blocks(out_HND):
        f = numbers(codes_HNP[some], bits, out_HND.shape[2])
        x = (f.view(*scale_HNG[some].shape, -1) * scale_HNG[some][..., None]).flatten(2)
        clamp_to_range(x, out_HND.dtype)
        out_HND[some] = x
