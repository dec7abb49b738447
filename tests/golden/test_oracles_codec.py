"""The codec oracles pinned by numbers worked out by hand; nothing of the harness is imported here."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.oracles import codec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# --- directed rounding -------------------------------------------------------------------------------------------


def test_rounding_down_and_up() -> None:
    # 0.1 in fp16: step 2^-14 between 2^-4 and 2^-3; 0.1 x 16384 = 1638.4
    assert codec.round_down(0.1, F16).item() == 1638 / 16384
    assert codec.round_up(0.1, F16).item() == 1639 / 16384
    assert codec.round_down(-0.1, F16).item() == -1639 / 16384
    assert codec.round_up(-0.1, F16).item() == -1638 / 16384
    # 0.1 in bf16: step 2^-11 there; 0.1 x 2048 = 204.8
    assert codec.round_down(0.1, BF16).item() == 204 / 2048
    assert codec.round_up(0.1, BF16).item() == 205 / 2048
    for dtype in (F16, BF16, F32):
        for value in (0.0, 1.5, -2.0, 384.0):  # representable: both give the value
            assert codec.round_down(value, dtype).item() == codec.round_up(value, dtype).item() == value


def test_rounding_at_the_ends_of_fp16() -> None:
    assert codec.round_up(1e-9, F16).item() == 2.0**-24  # smallest subnormal, never 0
    assert codec.round_down(-1e-9, F16).item() == -(2.0**-24)
    assert codec.round_down(70000.0, F16).item() == 65504
    assert codec.round_up(70000.0, F16).item() == math.inf
    with pytest.raises(OverflowError, match="minimum"):
        codec.int_asym(torch.tensor([[[-70000.0, 1.0]]]), 4, 2, "token", F16)


# --- int8 --------------------------------------------------------------------------------------------------------


def test_int8_with_a_scale_of_one() -> None:
    # max 127 -> scale exactly 1; halves go to the even code
    x = torch.tensor([[[127.0, -126.6, 0.5, 1.5, -2.5, 0.4]]])
    got = codec.int8_per_token(x, F16)
    assert got.scale.tolist() == [[1.0]]
    assert got.codes.tolist() == [[[127, -127, 0, 2, -2, 0]]]
    assert got.decoded.tolist() == [[[127, -127, 0, 2, -2, 0]]]


def test_int8_scale_is_rounded_up() -> None:
    # 1/127 = .007874016; fp16 step there 2^-17: x 131072 = 1032.06 -> 1033; nearest (1032) would be too small
    # codes: 1 x 131072 / 1033 = 126.885 -> 127; .5 -> 63.44 -> 63
    got = codec.int8_per_token(torch.tensor([[[1.0, 0.5, -1.0]]]), F16)
    assert got.scale.item() == 1033 / 131072
    assert got.codes.tolist() == [[[127, 63, -127]]]
    assert got.decoded[0, 0].tolist() == [127 * 1033 / 131072, 63 * 1033 / 131072, -127 * 1033 / 131072]
    # bf16 step 2^-14: x 16384 = 129.008 -> 130; codes 16384/130 = 126.03 -> 126; 63.02 -> 63
    got = codec.int8_per_token(torch.tensor([[[1.0, 0.5, -1.0]]]), BF16)
    assert got.scale.item() == 130 / 16384
    assert got.codes.tolist() == [[[126, 63, -126]]]


def test_int8_scales_belong_to_a_token_and_a_head() -> None:
    x = torch.tensor([[[127.0, 1.0], [0.0, 0.0]], [[254.0, 3.0], [1.0, 12.7]]])
    got = codec.int8_per_token(x, F32)
    assert got.scale[:, 0].tolist() == [1.0, 2.0]
    assert got.codes.tolist() == [[[127, 1], [0, 0]], [[127, 2], [10, 127]]]  # 3/2 = 1.5 -> 2
    assert got.decoded[0, 1].tolist() == [0, 0]  # a row of zeros, its neighbours untouched
    assert got.scale[0, 1].item() == 0
    one = codec.int8_per_token(x[:1], F32)
    assert torch.equal(one.codes[0], got.codes[0])


# --- asymmetric groups -------------------------------------------------------------------------------------------


def test_channel_groups_run_along_tokens() -> None:
    # channel 0: tokens 0 1 2 15 -> minimum 0, scale 1; channel 1: 10 10 40 25 -> minimum 10, scale 30/15 = 2
    x = torch.tensor([[[0.0, 10.0], [1.0, 10.0], [2.0, 40.0], [15.0, 25.0]]])
    got = codec.int_asym(x, 4, 4, "channel", F16)
    assert got.minimum is not None
    assert got.minimum.tolist() == [[[0, 10]]]
    assert got.scale.tolist() == [[[1, 2]]]
    assert got.codes.tolist() == [[[0, 0], [1, 0], [2, 15], [15, 8]]]  # (25-10)/2 = 7.5 -> 8
    assert got.decoded.tolist() == [[[0, 10], [1, 10], [2, 40], [15, 26]]]


def test_token_groups_run_along_channels() -> None:
    # token 0: groups (0 3) and (-1 14); token 1: (2 2) constant and (6 9)
    x = torch.tensor([[[0.0, 3.0, -1.0, 14.0], [2.0, 2.0, 6.0, 9.0]]])
    got = codec.int_asym(x, 2, 2, "token", F16)  # codes 0..3
    assert got.minimum is not None
    assert got.minimum.tolist() == [[[0, -1], [2, 6]]]
    assert got.scale.tolist() == [[[1, 5], [0, 1]]]
    assert got.codes.tolist() == [[[0, 3, 0, 3], [0, 0, 0, 3]]]
    assert torch.equal(got.decoded, x.double())


def test_codes_are_taken_against_the_stored_values() -> None:
    # fp32 values 0.1 .. 1.6 in fp16 metadata: minimum 1638/16384 = .09997559,
    # (1.6 - .09997559)/15 = .10000163, x 16384 = 1638.43 -> 1639/16384 = .10003662
    # codes: (.1 - .09997559)/.10003662 = .0002 -> 0; (.5501 - ..)/.. = 4.4996 -> 4
    # (4.501 -> 5 against the exact ones); (1.6 - ..)/.. = 14.9948 -> 15
    got = codec.int_asym(torch.tensor([[[0.1, 0.5501, 1.6]]]), 4, 3, "token", F16)
    assert got.minimum is not None
    assert got.minimum.item() == 1638 / 16384
    assert got.scale.item() == 1639 / 16384
    assert got.codes.tolist() == [[[0, 4, 15]]]
    assert got.quotient[0, 0].tolist() == pytest.approx([0.000244, 4.499596, 14.994753], abs=1e-5)
    assert got.decoded[0, 0].tolist() == [1638 / 16384, (1638 + 4 * 1639) / 16384, (1638 + 15 * 1639) / 16384]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_zero_and_constant_groups(bits: int, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 4, 8)
    x[0, :, 4:] = torch.arange(16.0).reshape(4, 4)
    got = codec.int_asym(x, bits, 4, "token", dtype)
    assert got.decoded[0, :, :4].abs().max() == 0
    assert torch.isfinite(got.decoded).all()
    alone = codec.int_asym(x[:, :, 4:], bits, 4, "token", dtype)
    assert torch.equal(got.decoded[:, :, 4:], alone.decoded)
    held = codec.int_asym(torch.full((1, 1, 4), -3.25), bits, 4, "token", dtype)  # representable in all three
    assert held.decoded.tolist() == [[[-3.25] * 4]]
    rough = codec.int_asym(torch.full((1, 1, 4), 0.1), bits, 4, "token", F16)  # not representable: one step of fp16 off
    assert (rough.decoded - 0.1).abs().max() < 2**-14


def test_a_bf16_minimum_beyond_fp16() -> None:
    # -70000 is -137 x 512 = -70144 in bf16; scale (1 + 70144)/15 = 4676.3, bf16 step 32: 147 x 32 = 4704
    x = torch.tensor([[[-70000.0, -1.0, 0.5, 1.0]]]).to(BF16)
    got = codec.int_asym(x, 4, 4, "token", BF16)
    assert got.minimum is not None
    assert (got.minimum.item(), got.scale.item()) == (-70144, 4704)
    # 70143/4704 = 14.911 -> 15: -70144 + 15 x 4704 = 416, within half a step (2352)
    assert got.codes.tolist() == [[[0, 15, 15, 15]]]
    assert got.decoded.tolist() == [[[-70144, 416, 416, 416]]]


def test_key_axis_and_the_outlier_channel() -> None:
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[:, :, 7] += 100
    others = [c for c in range(64) if c != 7]

    def error(axis: str) -> float:
        wrong = codec.int_asym(x, 4, 64, axis, F16).decoded[..., others] - x[..., others]
        return (wrong.square().mean() / x[..., others].square().mean()).sqrt().item()

    assert error("channel") == pytest.approx(0.09, abs=0.01)
    assert error("token") > 1  # every normal channel falls on one of the two lowest codes


def test_the_exact_tail() -> None:
    assert [codec.encoded_tokens(n, 32, 32, "channel") for n in (0, 32, 63, 64, 95, 96, 256)] == [
        0,
        0,
        0,
        32,
        32,
        64,
        224,
    ]
    assert [codec.encoded_tokens(n, 32, 32, "token") for n in (0, 32, 63, 64)] == [0, 0, 31, 32]
    x = torch.arange(7.0).reshape(1, 7, 1)
    coded, tail = codec.int_asym_with_tail(x, 4, 2, "channel", 2, F16)  # 5 old rows -> 2 groups; tail 4 5 6
    assert coded.codes.tolist() == [[[0], [15], [0], [15]]]
    assert tail.tolist() == [[[4], [5], [6]]]
    with pytest.raises(ValueError, match="does not divide"):
        codec.int_asym(torch.zeros(1, 1, 96), 4, 64, "token", F16)


# --- packing -----------------------------------------------------------------------------------------------------

IN_ORDER = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # codes 0 1 2 .. 15
SWAPPED = [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]  # codes 1 0 3 2 .. 15 14
LOW = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F]
HIGH = [0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0]


def packed(line: list[int]) -> list[int]:
    out = codec.pack4(torch.tensor([[line]]))
    assert out.dtype == torch.uint8
    assert codec.unpack4(out, len(line)).tolist() == [[line]]
    return [int(b) for b in out[0, 0]]


def test_nibbles_are_the_constants() -> None:
    every = list(range(16))
    assert packed(every) == IN_ORDER
    assert packed([1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14]) == SWAPPED
    assert [packed([c])[0] for c in every] == LOW
    assert [packed([c, 0])[0] for c in every] == LOW
    assert [packed([0, c])[0] for c in every] == HIGH
    assert packed(every + every) == IN_ORDER + IN_ORDER  # 32
    assert packed([*every, *every, 9]) == [*IN_ORDER, *IN_ORDER, 0x09]  # 33: the last high nibble is 0
    assert packed([5, 10, 15]) == [0xA5, 0x0F]
