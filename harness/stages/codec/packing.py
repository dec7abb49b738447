"""Unsigned codes of 2, 4 or 8 bits packed into bytes along the channel axis; it knows nothing of scales.

Layout: code i of a row sits in byte i // (8 / bits), at bit (i % (8 / bits)) * bits; the first code is in the lowest bits.
With 4 bits the codes 1, 2, 3 of a row become the bytes 0x21, 0x03. The last byte of a row is padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_width(d: int, bits: int) -> int:
    """Bytes a row of d codes takes."""
    return -(-d * bits // 8)


def pack(codes_HND: Tensor, bits: int) -> Tensor:
    """uint8 codes [H, N, D] -> uint8 bytes [H, N, ceil(D * bits / 8)]."""
    per = 8 // bits
    if per == 1:
        return codes_HND
    d = codes_HND.shape[-1]
    if d % per:
        codes_HND = torch.nn.functional.pad(codes_HND, (0, per - d % per))
    packed = codes_HND[..., 0::per].clone()
    for i in range(1, per):
        packed |= codes_HND[..., i::per] << (i * bits)
    return packed


def unpack_into(packed_HNP: Tensor, bits: int, out_HND: Tensor) -> None:
    """uint8 bytes [H, N, P] -> codes as numbers in out_HND [H, N, D], whatever its dtype."""
    per = 8 // bits
    mask = (1 << bits) - 1
    for i in range(per):
        codes = out_HND[..., i::per]
        codes.copy_(((packed_HNP >> (i * bits)) & mask)[..., : codes.shape[-1]])
