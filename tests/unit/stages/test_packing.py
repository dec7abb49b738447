"""Packed codes: bytes equal hand-written constants, whatever the position, the width and the number of codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.stages.codec.packing import WIDTHS, pack, packed_width, unpack
from tests.support.oracles import codec as oracle


def rows(*codes: list[int]) -> Tensor:
    return torch.tensor([list(codes)], dtype=torch.uint8)


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
        (1, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0x01, 0x02]),
        (1, [0, 1, 1, 0, 1, 0, 0, 1], [0x96]),
        (3, list(range(8)), [0xE4, 0xE4, 0xF0]),
        (3, [5], [0x01, 0x01]),
        (3, [7, 0, 4, 3, 6], [0b11000011, 0b00000010, 0b00010101]),
        (3, [4] * 16, [0, 0, 0, 0, 0xFF, 0xFF]),
    ],
)
def test_case_7_bytes_are_the_documented_constants(bits: int, codes: list[int], packed: list[int]) -> None:
    found = pack(rows(codes), bits)
    assert found.dtype == torch.uint8
    assert found[0, 0].tolist() == packed
    assert packed_width(len(codes), bits) == len(packed)
    assert unpack(found, bits, len(codes))[0, 0].tolist() == codes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("d", [32, 33, 5])
def test_every_code_in_every_position(bits: int, d: int) -> None:
    top = 1 << bits
    table = (torch.arange(d)[None] + torch.arange(top)[:, None]) % top  # row r, position i: code (i + r) mod 2^bits
    codes = torch.stack([table, table.flip(0)]).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, top, packed_width(d, bits))
    assert torch.equal(unpack(packed, bits, d), codes)
    assert torch.equal(unpack(packed[:, 1::2], bits, d), codes[:, 1::2])  # rows need not stand together
    if bits == 4:
        assert torch.equal(packed, oracle.pack4(codes.long()))
        assert torch.equal(oracle.unpack4(packed, d), codes.long())


def test_three_bits_take_three_bytes_for_eight_codes() -> None:
    assert [packed_width(d, 3) for d in (8, 16, 64, 96, 128)] == [3, 6, 24, 36, 48]


def test_padding_bits_are_zero() -> None:
    assert pack(rows([15] * 33), 4)[0, 0, -1] == 0x0F
    assert pack(rows([3] * 33), 2)[0, 0, -1] == 0x03
    assert pack(rows([1] * 33), 1)[0, 0, -1] == 0x01
    assert pack(rows([7] * 33), 3)[0, 0, [8, -1]].tolist() == [0x03, 0x01]


def test_packing_does_not_touch_its_input() -> None:
    codes = rows([1, 2, 3, 4])
    pack(codes, 4)
    assert codes[0, 0].tolist() == [1, 2, 3, 4]
