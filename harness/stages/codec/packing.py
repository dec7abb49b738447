"""Packing of unsigned codes of 1, 2, 3, 4 or 8 bits into bytes along the channel axis.

Layout of 1, 2, 4 and 8 bits: code i of a token is in byte i // (8 / bits), at bit (i % (8 / bits)) * bits; the first code is in
the lowest bits. With 4 bits the codes 1, 2, 3 become the bytes 0x21, 0x03.
Layout of 3 bits: the low two bits of all codes as above, then the high bits of all codes as above, 8 codes in 3 bytes: the
codes 0, 1 .. 7 become the bytes 0xE4, 0xE4, 0xF0.
The last byte of a token (with 3 bits: of its low and of its high bits) is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WIDTHS = (1, 2, 3, 4, 8)

# Bits to (wider integer, [(shift, mask) ...]): a packed byte is spread to one byte a code, each step doubles their number.
_SPREAD: dict[int, tuple[torch.dtype, tuple[tuple[int, int], ...]]] = {
    4: (torch.int16, ((4, 0x0F0F),)),
    2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (torch.int64, ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))),
}
_CACHED = 1 << 17  # elements that fit a CPU core's cache during several passes


def packed_width(d: int, bits: int) -> int:
    """Bytes that d codes take."""
    return packed_width(d, 2) + packed_width(d, 1) if bits == 3 else -(-d * bits // 8)


def pack(codes_HND: Tensor, bits: int) -> Tensor:
    """uint8 codes [H, N, D] -> uint8 bytes [H, N, packed_width(D, bits)]."""
    if bits == 8:
        return codes_HND
    if bits == 3:
        return torch.cat((pack(codes_HND & 3, 2), pack(codes_HND >> 2, 1)), -1)
    per = 8 // bits
    d = codes_HND.shape[-1]
    if d % per:
        codes_HND = torch.nn.functional.pad(codes_HND, (0, per - d % per))
    packed = codes_HND[..., 0::per].clone()
    for i in range(1, per):
        packed |= codes_HND[..., i::per] << (i * bits)
    return packed


def unpack(packed_HNP: Tensor, bits: int, d: int) -> Tensor:
    """uint8 bytes [H, N, P] -> uint8 codes [H, N, D]."""
    if bits == 8:
        return packed_HNP
    if bits == 3:
        low = packed_width(d, 2)
        high = unpack(packed_HNP[..., low:], 1, d)
        return (high << 2).bitwise_or_(unpack(packed_HNP[..., :low], 2, d))
    wide, steps = _SPREAD[bits]
    lanes = packed_HNP.to(wide)
    for shift, mask in steps:
        lanes = (lanes << shift).bitwise_or_(lanes).bitwise_and_(mask)
    return lanes.contiguous().view(torch.uint8)[..., :d]


def head_blocks(x_HND: Tensor) -> Iterator[slice]:
    """Slices of heads to encode or decode together: a few on a CPU, so that all passes stay in its cache; elsewhere all."""
    h, n, d = x_HND.shape
    step = max(1, _CACHED // max(n * d, 1)) if x_HND.device.type == "cpu" else max(h, 1)
    return (slice(at, min(at + step, h)) for at in range(0, max(h, 1), step))


def set_blocks(x_HND: Tensor, together: int) -> Iterator[slice]:
    """The same for heads that go together, so many: one set on a CPU, elsewhere all."""
    h = len(x_HND)
    step = together if x_HND.device.type == "cpu" else max(h, 1)
    return (slice(at, at + step) for at in range(0, max(h, 1), step))
