"""Numbers that floating-point block formats are made of: e2m1 in 4 bits, e4m3 in 8, and powers of two in a byte (e8m0).

Formats: the OCP Microscaling specification 1.0, and arXiv 2310.10537. Rounding is to nearest, ties to an even mantissa, and
saturates: what is beyond the largest number becomes it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from harness.stages.codec.codebook import counted_below, looked_up
from harness.stages.codec.packing import head_blocks, pack

E4M3 = torch.float8_e4m3fn
TOP = {4: 6.0, 8: 448.0}  # by bits: the largest number
EXPONENT = {4: 2, 8: 8}  # its exponent
HALF_STEP = {4: 1.0, 8: 16.0}  # half of the step that leads to it
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; 8 more is the negative


def coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers x [..., D], fp32, in e2m1 (4 bits) or e4m3 (8).

    Returns:
        (uint8 codes [..., packed_width(D, bits)], the first of two in the low bits; how many elements are further beyond the
        largest number than rounding reaches, 0-d).
    """
    clipped = (x.abs() > TOP[bits] + HALF_STEP[bits]).sum()
    if bits == 8:
        return to_e4m3(x), clipped
    codes = counted_below(x.abs(), _cuts(x.device))
    return pack(codes | (x.signbit().to(torch.uint8) << 3), 4), clipped


def numbers(codes: Tensor, bits: int, d: int) -> Tensor:
    """What codes [H, N, P] stand for, fp32 [H, N, d]."""
    return looked_up(codes, 4, _e2m1(codes.device), d) if bits == 4 else from_e4m3(codes, torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """The codes of fp32 numbers, as uint8: not every device can concatenate and index fp8 tensors."""
    return x.clamp(-TOP[8], TOP[8]).to(E4M3).view(torch.uint8)


def from_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes [H, N, D]."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    read_e4m3(codes, out)
    return out


def read_e4m3(codes: Tensor, out: Tensor) -> None:
    """Write the numbers of codes [H, N, D] into `out`.

    torch converts e4m3 four times slower than int8 on a CPU. Shifted into the bits of a float16 (exponent bias 15 instead of 7)
    the code is the number times 2^-8.
    """
    for some in head_blocks(out):
        bits = (codes[some].view(torch.int8).to(torch.int16) << 7).bitwise_and_(-0x4001)
        out[some] = bits.view(torch.float16)
        out[some].mul_(256)


@lru_cache
def powers(device: torch.device) -> Tensor:
    """What the bytes of e8m0 stand for, 2^(byte - 127), fp32 [255]; the byte 255 is no number."""
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)]).to(device)


def looked_up_powers(bytes_: Tensor) -> Tensor:
    """Powers of two by their bytes (an integer tensor of any shape), fp32."""
    return powers(bytes_.device).index_select(0, bytes_.flatten().int()).view(bytes_.shape)


@lru_cache
def _e2m1(device: torch.device) -> Tensor:
    return torch.tensor([*_E2M1, *(-number for number in _E2M1)]).to(device)


@lru_cache
def _cuts(device: torch.device) -> Tensor:
    """The largest fp32 numbers that round to the codes 0 .. 6: midpoints, or what is just below where the tie goes up."""
    midpoints = [(low + high) / 2 for low, high in pairwise(_E2M1)]
    found = torch.tensor(midpoints)
    found[1::2] = torch.nextafter(found[1::2], torch.tensor(-math.inf))
    return found.to(device)
