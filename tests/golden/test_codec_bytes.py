"""Stored bytes of small inputs worked out by hand, and what a row costs in every codec: formulas written from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int8_static import Int8Static
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.kivi import Kivi
from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.encoded import Encoded
from harness.stages.limits import Calibration, Limits
from tests.support import conf_tree
from tests.support.codec_rows import encoded, heads_of, normal, stored

F16 = torch.float16


def group(**settings: Any) -> IntGroups:
    return IntGroups(**({"residual": 0, "axis": "token", "group": 4} | settings))


def held(e: Encoded) -> dict[str, list[Any]]:
    return {k: t[0].tolist() for k, t in {**e.payload, **e.metadata, **e.shared}.items()}


# --- packed bytes ------------------------------------------------------------------------------------------------


def test_one_bit() -> None:
    # minimum 1, maximum 9: half of the spread is 4; codes 0 1 0 1 0 0 1 1 from the lowest bit up: 0xCA
    x = torch.tensor([[[1.0, 9.0, 2.0, 8.0, 1.0, 4.0, 6.0, 9.0]]], dtype=F16)
    assert held(group(bits=1, group=8).encode(x)) == {"codes": [[0xCA]], "min": [[1]], "scale": [[4]]}
    # symmetric: largest 8, -4 and 4; codes 1 0 1 0 (0.5 is nearer to 4, -0.5 to -4)
    x = torch.tensor([[[8.0, -8.0, 0.5, -0.5]]], dtype=F16)
    e = group(bits=1, symmetric=True).encode(x)
    assert held(e) == {"codes": [[0b0101]], "scale": [[4]]}
    out = torch.empty(1, 1, 4)
    group(bits=1, symmetric=True).decode(e, out)
    assert out.tolist() == [[[4, -4, 4, -4]]]


def test_two_bits() -> None:
    # -1 .. 5 in steps of 2: codes 0 1 2 3 -> 0 + 4 + 32 + 192
    x = torch.tensor([[[-1.0, 1.0, 3.0, 5.0]]], dtype=F16)
    assert held(group(bits=2).encode(x)) == {"codes": [[0xE4]], "min": [[-1]], "scale": [[2]]}
    # symmetric: L = 1, scale 6; -6 -> 0, 0 -> 1, 6 -> 2, 2 -> 1 (a third of a step)
    x = torch.tensor([[[-6.0, 0.0, 6.0, 2.0]]], dtype=F16)
    assert held(group(bits=2, symmetric=True).encode(x)) == {"codes": [[0 + 4 + 32 + 64]], "scale": [[6]]}


def test_three_bits_are_two_planes() -> None:
    # 10 .. 17 in steps of 1: codes 0 .. 7: low bits 0 1 2 3 0 1 2 3, high bits 0 0 0 0 1 1 1 1
    x = torch.arange(10.0, 18.0, dtype=F16)[None, None]
    assert held(group(bits=3, group=8).encode(x)) == {"codes": [[0xE4, 0xE4, 0xF0]], "min": [[10]], "scale": [[1]]}
    # symmetric: L = 3, scale 2: -6 -> 0, -2 -> 2, 0 -> 3, 6 -> 6; low bits 0 2 3 2 = 0b10111000, high bits 0 0 0 1
    x = torch.tensor([[[-6.0, -2.0, 0.0, 6.0]]], dtype=F16)
    assert held(group(bits=3, symmetric=True).encode(x)) == {"codes": [[0xB8, 0x08]], "scale": [[2]]}


def test_four_bits_along_every_axis() -> None:
    # two tokens of two channels; minimum and scale of: columns, rows, the head, the layer's two heads
    x = torch.tensor([[[0.0, 30.0], [15.0, 0.0]], [[15.0, 0.0], [0.0, 60.0]]], dtype=F16)
    e = group(bits=4, axis="channel", group=2).encode(x)
    assert held(e) == {"codes": [[0xF0], [0x0F]], "min": [[0, 0]], "scale": [[1, 2]]}
    e = group(bits=4, axis="token", group=2).encode(x)
    assert held(e) == {"codes": [[0xF0], [0x0F]], "min": [[0], [0]], "scale": [[2], [1]]}
    e = group(bits=4, axis="head", group=2).encode(x)
    assert held(e) == {"codes": [[0xF0], [0x08]], "min": [[0]], "scale": [[2]]}  # 15 / 2 = 7.5 -> 8
    e = group(bits=4, axis="tensor", group=2).fit(x, heads_of(2)).encode(x)
    assert held(e) == {"codes": [[0x80], [0x04]], "min": [[0]], "scale": [[4]]}  # 30 / 4 -> 8, 15 / 4 = 3.75 -> 4
    assert e.metadata["scale"].tolist() == [[[4]], [[4]]]
    e = group(bits=4, symmetric=True, axis="channel", group=2).encode(x * 7 / 15)  # L = 7: 7 -> 14, 14 -> 14, 0 -> 7
    assert held(e) == {"codes": [[0xE7], [0x7E]], "scale": [[1, 2]]}


def test_int8_with_fixed_limits() -> None:
    calibration = Calibration(corpus=conf_tree.member("corpus", "stdlib"))
    limits = Limits({0: torch.tensor([[127.0, 254.0]]), 1: torch.tensor([[12.7, 0.0]])})
    x = torch.tensor([[[1.4, -254.0]], [[-12.7, 0.0]]])
    codec = Int8Static(calibration=calibration).calibrated(limits).fit(x, heads_of(2, 2))
    e = codec.encode(x)
    assert e.payload["codes"].tolist() == [[[1, -127]], [[-127, 0]]]
    assert e.shared["scale"][0].tolist() == [1, 2]
    for axis, wanted in (("head", [2.0, 12.7 / 127]), ("tensor", [2.0, 12.7 / 127])):
        one = Int8Static(calibration=calibration, axis=axis).calibrated(limits).fit(x, heads_of(2, 2))
        assert one.encode(x).shared["scale"].flatten().tolist() == pytest.approx(wanted)
    both = Limits({0: torch.tensor([[127.0, 254.0], [508.0, 1.0]])})
    one = Int8Static(calibration=calibration, axis="tensor").calibrated(both).fit(x, heads_of(2, 1))
    assert one.encode(x).shared["scale"].flatten().tolist() == [4, 4]


def test_eight_bit_floats() -> None:
    # e4m3, bias 7: 1 = 0 0111 000; 448 = 0 1111 110; -1.125 = 1 0111 001; 2^-9 = 0 0000 001; 500 is clamped to 448
    x = torch.tensor([[[1.0, 448.0, -1.125, 2.0**-9, 500.0, 0.0]]])
    e = Float8(scale="unit").encode(x)
    assert held(e) == {"codes": [[0x38, 0x7E, 0xB9, 0x01, 0x7E, 0x00]]}
    assert int(e.clipped) == 1
    # e5m2, bias 15: 1 = 0 01111 00; 57344 = 0 11110 11; -1.25 = 1 01111 01; 2^-16 = 0 00000 01
    x = torch.tensor([[[1.0, 57344.0, -1.25, 2.0**-16, -60000.0]]])
    e = Float8(format="e5m2", scale="unit").encode(x)
    assert held(e) == {"codes": [[0x3C, 0x7B, 0xBD, 0x01, 0xFB]]}
    assert int(e.clipped) == 1
    # frozen on 896: scale 2, and 1.0 is stored as 0.5 = 0 0110 000
    e = encoded(Float8(scale="frozen", first=1), torch.tensor([[[896.0, 1.0]]]))
    assert held(e) == {"codes": [[0x7E, 0x30]], "scale": [2]}


def test_a_turned_row_in_four_bits() -> None:
    # (1 0 0 0) turned is (.5 .5 .5 .5): a constant group, exact; (2 4 6 8) is (10 -2 -4 0): minimum -4, scale 14/15 in fp32
    codec = Hadamard(inner=group(bits=4))
    e = codec.encode(torch.tensor([[[1.0, 0, 0, 0], [2.0, 4, 6, 8]]]))
    assert e.payload["codes"].tolist() == [[[0x00, 0x00], [0x2F, 0x40]]]  # 15, 2/.93 = 2.1, 0, 4/.93 = 4.3
    assert e.metadata["min"].flatten().tolist() == [0.5, -4]
    assert e.metadata["scale"].flatten().tolist() == pytest.approx([0, 14 / 15])
    out = torch.empty(1, 2, 4)
    codec.decode(e, out)
    assert out[0, 0].tolist() == [1, 0, 0, 0]


# --- bytes a row -------------------------------------------------------------------------------------------------


def ratio(codec: Any, n: int = 4096, d: int = 64) -> float:
    """Bytes of n rows of a 16-bit cache over what the codec measures for them."""
    rows = stored(codec, normal(2, n, d).half(), [n])
    assert rows.tail_HND is not None
    tensors = [*(rows.whole.tensors() if rows.chunks else []), rows.tail_HND]
    return 2 * n * d * 2 / sum(t.untyped_storage().nbytes() for t in tensors)


def test_static_saves_half_dynamic_a_little_less() -> None:
    assert f"{ratio(Int8()):.2f}" == "1.94"  # 2 x 64 / (64 + 2)
    assert ratio(Int8()) == 128 / 66
    static = conf_tree.member("codec", "int8_static")
    assert f"{ratio(static):.2f}" == "2.00"
    assert ratio(static) == 2 * 4096 / (4096 + 4)  # 4 bytes a channel, once
    assert f"{ratio(conf_tree.member('codec', 'fp8_e4m3_static')):.2f}" == "2.00"
    assert ratio(Float8(scale="unit")) == 2


@pytest.mark.parametrize(
    ("codec", "bytes_a_row"),  # d = 64, 16-bit metadata, one of keys and values
    [
        (group(bits=4, group=32, axis="channel"), 32 + 2 * 64 * 2 / 32),
        (group(bits=4, group=32, axis="token"), 32 + 2 * 2 * 2),
        (group(bits=4, group=None, axis="token"), 36),  # QuaRot: 2 (d b / 8 + 4) for both
        (Hadamard(inner=group(bits=4, group=None, axis="token")), 36),
        (group(bits=3, group=32, axis="channel"), 24 + 8),
        (group(bits=2, group=32, axis="token"), 16 + 8),  # KIVI: 0.75 d for both
        (group(bits=1, group=32, axis="token"), 8 + 8),
        (group(bits=2, group=32, axis="token", symmetric=True), 16 + 4),
        (group(bits=8, group=32, axis="channel", symmetric=True), 64 + 4),
        (group(bits=8, group=32, axis="head", symmetric=True), 64 + 2 / 32),
        (group(bits=8, group=32, axis="tensor"), 64 + 4 / 32),
        (MxFloat(), 32 + 2),  # 4.25 bits an element
        (MxFloat(bits=8), 64 + 2),
        (NvFloat4(scale="unit"), 32 + 4),  # 4.5 bits
        (NvFloat4(), 36 + 4 / 1024),  # and one constant
    ],
    ids=str,
)
def test_bytes_a_row(codec: Any, bytes_a_row: float) -> None:
    assert ratio(codec, 1024) == 128 / bytes_a_row


def test_kivi_with_its_exact_rows() -> None:
    keys, values = (Kivi().for_role(role) for role in ("keys", "values"))
    # 1,100 rows: 1,024 keys in 24 bytes and 76 exact; 972 values in 24 bytes and 128 exact
    assert ratio(keys, 1100) == 1100 * 128 / (1024 * 24 + 76 * 128)
    assert ratio(values, 1100) == 1100 * 128 / (972 * 24 + 128 * 128)
