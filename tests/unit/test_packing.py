"""Packed codes: bytes equal hand-written constants, whatever the position, the width and the number of codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.stages.codec.packing import pack, packed_width, unpack_into
from tests.oracles import codec as oracle


def rows(*codes: list[int]) -> Tensor:
    return torch.tensor([list(codes)], dtype=torch.uint8)


def unpacked(packed: Tensor, bits: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((*packed.shape[:2], d), -1.0, dtype=dtype)
    unpack_into(packed, bits, out)
    return out


# Case 7: the bytes themselves, not only the round trip.
@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [1, 2, 3], [0x21, 0x03]),
        (4, [15, 0, 0, 15], [0x0F, 0xF0]),
        (4, list(range(16)), [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]),
        (4, [7], [0x07]),
        (2, [1, 2, 3, 0], [0b00111001]),
        (2, [3, 3, 3, 3, 1], [0xFF, 0x01]),
        (8, [0, 127, 128, 255], [0, 127, 128, 255]),
    ],
)
def test_case_7_bytes_are_the_documented_constants(bits: int, codes: list[int], packed: list[int]) -> None:
    found = pack(rows(codes), bits)
    assert found.dtype == torch.uint8
    assert found[0, 0].tolist() == packed
    assert packed_width(len(codes), bits) == len(packed)
    assert unpacked(found, bits, len(codes))[0, 0].tolist() == codes


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("d", [32, 33, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_in_every_position(bits: int, d: int, dtype: torch.dtype) -> None:
    top = 1 << bits
    table = (torch.arange(d)[None] + torch.arange(top)[:, None]) % top  # row r, position i: code (i + r) mod 2^bits
    codes = torch.stack([table, table.flip(0)]).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, top, packed_width(d, bits))
    assert torch.equal(unpacked(packed, bits, d, dtype), codes.to(dtype))
    if bits == 4:
        assert torch.equal(packed, oracle.pack4(codes.long()))
        assert torch.equal(oracle.unpack4(packed, d), codes.long())


def test_padding_bits_are_zero() -> None:
    assert pack(rows([15] * 33), 4)[0, 0, -1] == 0x0F
    assert pack(rows([3] * 33), 2)[0, 0, -1] == 0x03


def test_packing_does_not_touch_its_input() -> None:
    codes = rows([1, 2, 3, 4])
    pack(codes, 4)
    assert codes[0, 0].tolist() == [1, 2, 3, 4]
