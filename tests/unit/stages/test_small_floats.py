"""NVFP4, MXFP4 and MXFP8: stored bits worked out by hand, equal to exact arithmetic, within their bounds, saturation counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.codec.packing import unpack
from tests.support.codec_rows import DTYPES, decode, fitted, heads_of, normal
from tests.support.oracles import small_floats as oracle

TIES = [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # between two neighbours each, but for zero: the even one is right
EVEN = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def spread(dtype: torch.dtype, d: int = 64) -> Tensor:
    """Numbers of many sizes, [2, 24, d]: channels from 2^-8 to 2^8, and a token that is nearly nothing."""
    x = normal(2, 24, d) * torch.logspace(-8, 8, d, base=2)
    x[1, 3] *= 2.0**-12
    x[0, 7, :32] = 0
    return x.to(dtype)


def test_four_bits_by_hand() -> None:
    # the largest is 6 = 1.5 * 2^2, so k = 0 and the byte 127; codes 0 0 2 2 4 4 6 6 and their negatives (8 more), 7 and 15 for 6
    x = torch.tensor([[[*TIES, *(-value for value in TIES), 6.0, -6.0, *[0.0] * 14]]])
    e = MxFloat().encode(x)
    assert e.metadata["scale"].tolist() == [[[127]]]
    assert e.payload["codes"][0, 0, :9].tolist() == [0x00, 0x22, 0x44, 0x66, 0x88, 0xAA, 0xCC, 0xEE, 0xF7]
    got = decode(MxFloat(), e, x)[0, 0]
    assert got.tolist() == [*EVEN, *(-value for value in EVEN), 6.0, -6.0, *[0.0] * 14]
    # a neighbour above each tie goes up
    up = torch.nextafter(x, torch.full_like(x, torch.inf))
    above = unpack(MxFloat().encode(up).payload["codes"], 4, 32)[0, 0, 1:8].tolist()
    assert above == [1, 2, 3, 4, 5, 6, 7]


def test_eight_bits_by_hand() -> None:
    # 448 = 1.75 * 2^8: k = 0; 1 = 0 0111 000, -1.125 = 1 0111 001, 2^-9 = 0 0000 001; 449 .. 464 become 448
    x = torch.zeros(1, 1, 32)
    x[0, 0, :5] = torch.tensor([448.0, 1.0, -1.125, 2.0**-9, 464.0])
    e = MxFloat(bits=8).encode(x)
    assert e.metadata["scale"].tolist() == [[[127]]] and int(e.clipped) == 0
    assert e.payload["codes"][0, 0, :6].tolist() == [0x7E, 0x38, 0xB9, 0x01, 0x7E, 0x00]


def test_a_scale_that_is_itself_a_small_float_by_hand() -> None:
    # limit 2688 * 2: g = 2; the largest of 16 is 12, so s = 12 / 6 / 2 = 1 = 0 0111 000, and elements are in units of 2
    x = torch.zeros(1, 2, 16)
    x[0, 0, 0] = 5376.0
    x[0, 1, :3] = torch.tensor([12.0, -3.0, 0.9])
    codec = NvFloat4(first=1).fit(x, heads_of(1))
    e = codec.encode(x)
    assert e.shared["scale"].tolist() == [[2.0]]
    assert e.metadata["scale"].tolist() == [[[0x7E], [0x38]]]  # 448 for the group that reaches the limit
    assert e.payload["codes"][0, 1, :2].tolist() == [0xB7, 0x01]  # 6, -1.5 (8 + 3); 0.45 -> 0.5
    assert decode(codec, e, x)[0, 1, :3].tolist() == [12, -3, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (8, 32)])
def test_powers_of_two_and_elements_equal_exact_arithmetic(bits: int, group: int, dtype: torch.dtype) -> None:
    x = spread(dtype)
    codec = MxFloat(bits=bits, group=group)
    e = codec.encode(x)
    got, clipped = decode(codec, e, x, torch.float32), 0
    for h in range(2):
        for n in range(24):
            for i in range(64 // group):
                want = oracle.mx(x[h, n, i * group : (i + 1) * group].tolist(), bits)
                clipped += want.clipped
                assert 2.0 ** (int(e.metadata["scale"][h, n, i]) - 127) == want.scale
                assert got[h, n, i * group : (i + 1) * group].tolist() == want.values
    assert int(e.clipped) == clipped > 0
    off, step = (got - x.float()).abs(), torch.exp2(e.metadata["scale"].float() - 127).repeat_interleave(group, 2)
    relative, smallest = (1 / 4, 1 / 4) if bits == 4 else (1 / 8, 2.0**-10)  # of those that saturate too
    assert bool((off <= torch.maximum(x.float().abs() * relative, step * smallest)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [{"scale": "unit"}, {"axis": "head"}, {"first": 4}], ids=str)
def test_scales_of_two_levels_equal_exact_arithmetic(settings: dict[str, object], dtype: torch.dtype) -> None:
    x = spread(dtype)
    codec = fitted(NvFloat4(**settings), x)  # type: ignore[arg-type]
    e = codec.encode(x)
    constants = e.shared["scale"].flatten().tolist() if e.shared else [1.0, 1.0]
    got, clipped, near = decode(codec, e, x, torch.float32), 0, 0
    scales = e.metadata["scale"].view(torch.float8_e4m3fn).float()
    for h in range(2):
        for n in range(24):
            for i in range(4):
                want = oracle.nv(x[h, n, 16 * i : 16 * i + 16].tolist(), constants[h])
                clipped += want.clipped
                assert scales[h, n, i] == float(want.scale)
                for value, exact, tie in zip(got[h, n, 16 * i :], want.values, want.near_ties, strict=False):
                    assert value.item() == pytest.approx(float(exact), rel=1e-6) or tie
                near += sum(want.near_ties)
    assert int(e.clipped) == clipped and near < 0.02 * x.numel()
    step = (scales * torch.tensor(constants)[:, None, None]).repeat_interleave(16, 2)
    held = (step > 0) & (x.float().abs() <= 7 * step)
    allowed = torch.maximum(x.float().abs() / 5, step / 4) * (1 + 1e-6)
    assert bool(((got - x.float()).abs() <= allowed)[held].all()) and float(held.float().mean()) > 0.8


def test_what_saturates_beyond_rounding_is_counted() -> None:
    x = torch.zeros(1, 1, 32)
    x[0, 0, :4] = torch.tensor([7.0, 7.1, -7.9, 6.9])  # k = 0: 7 is as far from 6 as rounding goes
    e = MxFloat().encode(x)
    assert int(e.clipped) == 2
    assert decode(MxFloat(), e, x)[0, 0, :4].tolist() == [6, 6, -6, 6]
    frozen = NvFloat4(first=1).fit(torch.full((1, 1, 32), 6.0), heads_of(1))
    later = frozen.encode(torch.tensor([[[12.0, 7.5, 6.5, 1.0] + [0.0] * 28]]))
    assert int(later.clipped) == 2  # beyond 7 / 6 of the limit
    assert decode(frozen, later, x)[0, 0, :2].tolist() == pytest.approx([6, 6])


def test_the_smallest_numbers_are_kept_or_become_zero() -> None:
    tiny = torch.tensor([[[2.0**-126, 2.0**-130, -(2.0**-128)] + [0.0] * 29]])
    e = MxFloat().encode(tiny)
    assert e.metadata["scale"].tolist() == [[[0]]]  # 2^-127 is the smallest power that a byte holds
    want = oracle.mx(tiny.flatten().tolist(), 4)
    assert decode(MxFloat(), e, tiny).flatten().tolist() == want.values
    codec = NvFloat4(first=1).fit(torch.full((1, 1, 16), 2688.0), heads_of(1))
    small = torch.full((1, 1, 16), 6 * 2.0**-10)  # half of the smallest s: a tie, which goes to zero
    e = codec.encode(small)
    assert e.metadata["scale"].tolist() == [[[0]]] and not e.payload["codes"].any() and int(e.clipped) == 0
