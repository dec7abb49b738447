"""What breaks quantizers: outlier channels, zeros, constants, huge values, other heads, wrong settings. Every codec is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int8_static import Int8Static
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.kivi import Kivi
from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.limits import Calibration, Limits
from tests.support import conf_tree
from tests.support.codec_rows import CODECS, DTYPES, LOSSY, D, encoded, fitted, heads_of, joins_heads, normal, roundtrip

GROUPS = [name for name in LOSSY if isinstance(CODECS[name], IntGroups)]


def test_case_1_outlier_channel_per_channel_and_per_token() -> None:
    x = normal(1, 64, 64)
    x[:, :, 7] += 100
    others = [c for c in range(64) if c != 7]

    def error(codec: Any) -> float:
        off = (roundtrip(codec, x) - x)[:, :, others]
        return float(off.square().mean().sqrt() / x[:, :, others].square().mean().sqrt())

    per_token = IntGroups(bits=4, group=None, axis="token", residual=0)
    assert error(IntGroups(bits=4, axis="channel", residual=0)) == pytest.approx(0.09, abs=0.02)
    assert error(per_token) == pytest.approx(2.30, abs=0.25)
    assert error(Kivi(bits=4).for_role("keys")) < 0.1
    assert error(Hadamard(inner=per_token)) < error(per_token)  # spread over all channels, an outlier costs less
    for name in ("int4", "int3", "int2", "int1", "int4_symmetric", "kivi2", "kivi4"):  # the default is the right one
        assert conf_tree.member("codec", name).for_role("keys").info()["axis"] == "channel"
        assert conf_tree.member("codec", name).for_role("values").info()["axis"] == "token"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_case_3_zeros_decode_to_zero_and_leave_neighbours_alone(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    n = 2 * max(codec.flush, 32)
    assert not roundtrip(codec, torch.zeros(2, n, D, dtype=dtype)).any()
    x = normal(2, n, D).to(dtype)
    half = x.clone()
    half[0, : n // 2, :32] = 0
    got, want = roundtrip(codec, half), roundtrip(codec, x)
    assert bool(torch.isfinite(got).all())
    if isinstance(codec, IntGroups) and codec.axis == "channel":
        assert not bool(got[0, : n // 2, :32].any())
    if not joins_heads(codec):
        assert torch.equal(got[1], want[1])
    if codec.info()["scale"] == "dynamic" and not codec.needs:  # these choose channels once, by all tokens
        assert torch.equal(got[0, n // 2 :], want[0, n // 2 :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_a_constant_group_is_exact(name: str, dtype: torch.dtype) -> None:
    codec: Any = CODECS[name]
    x = torch.full((1, codec.flush, D), 3.140625, dtype=dtype)
    off = (roundtrip(codec, x, torch.float32) - x.float()).abs().max()
    if not codec.symmetric:
        assert off == 0
    elif codec.bits > 1:  # a constant is the largest code
        assert off <= 3.2 * 2.0**-7
    else:
        assert off <= 3.2 / 2 * (1 + 2.0**-7)


@pytest.mark.parametrize("axis", ["channel", "token", "head", "tensor"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_case_4_bf16_beyond_the_range_of_fp16(axis: str, bits: int) -> None:
    x = normal(1, 32, 64).clamp(-1, 1)
    x[0, 3, 5] = -70000
    x = x.to(torch.bfloat16)
    codec = IntGroups(bits=bits, group=32, axis=axis, residual=0)
    for dtype in (torch.bfloat16, torch.float32):
        got = roundtrip(codec, x, dtype).float()
        assert bool(torch.isfinite(got).all())
        assert float((got - x.float()).abs().max()) <= 70001 / (2**bits - 1) / 2 * (1 + 2.0**-7) + 70000 * 2**-8


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_extremes_of_fp16_stay_finite(name: str, out: torch.dtype) -> None:
    codec = CODECS[name]
    top, tiny = 65504.0, 2.0**-24
    x = torch.tensor([[top, -top, 1.0, tiny], [top, top - 32, 0, 0], [tiny, -tiny, 0, tiny], [-top, 1, 2, 3]])
    x = x.repeat(2 * max(codec.flush, 32) // 4, D // 4)[None].half()
    got = roundtrip(codec, x, out).float()
    assert bool(torch.isfinite(got).all())
    if isinstance(codec, IntGroups | Int8):
        bits = int(codec.info()["bits"])  # type: ignore[call-overload]
        parts = 2**bits - 2 if codec.info().get("symmetric", True) and bits > 1 else 2**bits - 1
        assert float((got - x.float()).abs().max()) <= 2 * top / parts / 2 * 1.02 + top * 2**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_huge_values_and_a_lone_outlier_stay_finite(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    huge = 6e4 if dtype == torch.float16 else 1e37
    x = normal(2, 2 * max(codec.flush, 16), D)
    x[0, 5, 3] = huge  # within what constant scales are frozen on
    x[1, -1, 9] = -huge  # after it
    assert bool(torch.isfinite(roundtrip(codec, x.to(dtype))).all())
    x = (normal(2, 2 * max(codec.flush, 16), D).clamp(-3, 3) / 3 * huge).to(dtype)
    e = encoded(codec, x)
    assert bool(torch.isfinite(roundtrip(codec, x)).all())
    for tensor in [*e.metadata.values(), *e.shared.values()]:
        assert bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("name", LOSSY)
def test_case_6_one_head_does_not_see_another(name: str) -> None:
    codec = CODECS[name]
    x = normal(2, 2 * codec.flush, D)
    loud = torch.stack([x[0], x[1] * 1000])  # of another layer, where a layer's heads share a scale
    calm = fitted(codec, x, layers=2).encode(x)
    for a, b in zip(calm.tensors(), fitted(codec, loud, layers=2).encode(loud).tensors(), strict=True):
        assert torch.equal(a[0], b[0])
    if not joins_heads(codec):
        for a, b in zip(calm.tensors(), encoded(codec, x[:1]).tensors(), strict=True):
            assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("name", LOSSY)
def test_dynamic_scales_clip_nothing_and_say_so(name: str) -> None:
    codec, x = CODECS[name], normal(2, 256, D) * 50
    x[0, 200, 7] = 1e5
    info = codec.info()
    assert info["scale"] in ("dynamic", "unit", "frozen", "calibrated")
    if info["scale"] == "dynamic" and not isinstance(codec, MxFloat):  # whose scales are rounded down: its clipping is counted
        assert info["clipped"] == 0.0
        assert encoded(codec, x).clipped == 0


def test_case_12_scales_of_their_own_no_silent_clipping_and_the_source_recorded() -> None:
    keys, values = normal(2, 64, D).clamp(-1, 1) * 600, normal(2, 64, D) * 0.5
    unit = Float8(scale="unit")
    assert unit.info()["scale"] == "unit"
    over = int((keys.abs() > 448).sum())
    assert int(encoded(unit, keys).clipped) == over > 0
    assert roundtrip(unit, keys).abs().max() == 448
    assert int(encoded(unit, values).clipped) == 0
    limits = Limits({0: torch.full((2, D), 600.0)}, {"corpus": "text"})
    calibration = Calibration(corpus=conf_tree.member("corpus", "stdlib"))
    for codec in (
        Float8(scale="frozen", axis="tensor"),
        Float8(scale="calibrated", calibration=calibration).calibrated(limits),
    ):
        assert int(encoded(codec, keys).clipped) == 0
        assert bool(((roundtrip(codec, keys) - keys).abs() <= keys.abs() / 16 + 600 / 448 * 2**-10).all())
    assert Float8(scale="calibrated", calibration=calibration).calibrated(limits).info()["calibration"] == {"corpus": "text"}
    for x in (keys / 600 * 50, values):
        fixed = Int8Static(scale="frozen", first=64)
        assert bool(((roundtrip(fixed, x) - x).abs() <= x.abs().amax(1, True) / 127 * 0.501).all())
        assert float((roundtrip(Int8(), x) - x).abs().max()) <= float(x.abs().max()) / 127 * 0.51


def test_saturation_counts_elements_beyond_the_largest_code() -> None:
    calibration = Calibration(corpus=conf_tree.member("corpus", "stdlib"))
    codec = Int8Static(calibration=calibration).calibrated(Limits({0: torch.full((1, 2), 127.0)}))
    x = torch.tensor([[[127.4, -127.4], [127.6, -300.0], [0.0, 1e30]]])
    e = codec.fit(x, heads_of(1)).encode(x)
    assert e.payload["codes"].tolist() == [[[127, -127], [127, -127], [0, 127]]]
    assert int(e.clipped) == 3
    later = e.cat(codec.fit(x, heads_of(1)).encode(x))
    assert int(later.clipped) == 6


def test_a_channel_that_calibration_never_saw_move_is_counted_not_divided_by() -> None:
    calibration = Calibration(corpus=conf_tree.member("corpus", "stdlib"))
    codec = Int8Static(calibration=calibration).calibrated(Limits({0: torch.zeros(1, 4)}))
    x = torch.tensor([[[0.0, 1.0, -70000.0, 0.0]]])
    e = codec.fit(x, heads_of(1)).encode(x)
    out = torch.empty(1, 1, 4)
    codec.decode(e, out)
    assert int(e.clipped) == 2
    assert out.abs().max() < 1e-30


# --- settings ----------------------------------------------------------------------------------------------------

STDLIB = "stdlib"


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (IntGroups, {"bits": 5}, r"codec\.bits=5 is not possible: allowed are 1, 2, 3, 4, 8"),
        (IntGroups, {"symmetric": "no"}, r"codec\.symmetric='no' is not possible: true or false"),
        (IntGroups, {"group": 0}, r"codec\.group=0 is not possible"),
        (IntGroups, {"group": -1}, r"codec\.group=-1"),
        (IntGroups, {"group": 1}, r"codec\.group=1 "),
        (IntGroups, {"group": "32"}, r"codec\.group='32'"),
        (IntGroups, {"group": None}, r"codec\.group=None is not possible: null .* needs axis=token"),
        (IntGroups, {"axis": "row"}, r"codec\.axis='row' is not possible: allowed are auto, channel, token, head, tensor"),
        (IntGroups, {"residual": -1}, r"codec\.residual=-1"),
        (IntGroups, {"axis": "channel", "flush_tokens": 48}, r"codec\.flush_tokens=48 .* a multiple of the 32 tokens"),
        (Kivi, {"residual": 100}, r"codec\.residual=100 is not possible: a multiple of the group, 32"),
        (Kivi, {"axis": "token"}, r"codec\.axis='token'"),
        (Float8, {"format": "e3m4"}, r"codec\.format='e3m4' is not possible: allowed are e4m3, e5m2"),
        (Float8, {"scale": "dynamic"}, r"codec\.scale='dynamic' is not possible: allowed are unit, frozen, calibrated"),
        (Float8, {"axis": "token"}, r"codec\.axis='token' is not possible: allowed are channel, head, tensor"),
        (Float8, {"first": 0}, r"codec\.first=0"),
        (MxFloat, {"bits": 6}, r"codec\.bits=6 is not possible: allowed are 4 \(e2m1\) and 8 \(e4m3\)"),
        (MxFloat, {"group": 1}, r"codec\.group=1 is not possible"),
        (NvFloat4, {"axis": "channel"}, r"codec\.axis='channel' is not possible: allowed are tensor, head"),
        (NvFloat4, {"group": "16"}, r"codec\.group='16' is not possible"),
        (Int8Static, {}, r"codec\.calibration=None is not possible: codec\.scale=calibrated needs it"),
        (Calibration, {"corpus": STDLIB, "tokens": 0}, r"codec\.calibration\.tokens=0"),
        (Calibration, {"corpus": STDLIB, "window": "all"}, r"codec\.calibration\.window='all'"),
        (Calibration, {"corpus": STDLIB, "percentile": 50}, r"codec\.calibration\.percentile=50 .* from 90 to 100"),
    ],
)
def test_settings_are_refused_in_one_line(kind: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


def test_case_5_groups_must_divide_head_dim() -> None:
    for d in (80, 96):
        with pytest.raises(
            UserError, match=rf"codec\.group=64 is not possible: it must divide head_dim {d}: allowed are \[2, "
        ):
            IntGroups(group=64, axis="token").check(d)
        IntGroups(group=64, axis="channel").check(d)
        IntGroups(group=None, axis="token").check(d)
    for codec in (MxFloat(), NvFloat4(group=32)):
        with pytest.raises(UserError, match=r"codec\.group=32 is not possible: it must divide head_dim 80: allowed are \[2, "):
            codec.check(80)
    NvFloat4().check(80)


def test_rotation_needs_a_power_of_two_and_limits_without_rotation_are_refused() -> None:
    codec = conf_tree.member("codec", "hadamard_int4")
    for d in (32, 64, 128, 256):
        codec.check(d)
    for d in (80, 96):
        with pytest.raises(UserError, match=rf"codec hadamard_int4 .* head_dim {d}: it must be a power of two"):
            codec.check(d)
    with pytest.raises(UserError, match=r"codec\.inner='int8_static' is not possible: .*limits"):
        Hadamard(inner=conf_tree.member("codec", "int8_static"))
    with pytest.raises(UserError, match=r"codec\.group=48 .* must divide head_dim 64"):
        Hadamard(inner=IntGroups(axis="token", group=48)).check(64)


def test_constant_scales_without_a_table_are_refused() -> None:
    bare = Int8Static(calibration=Calibration(corpus=conf_tree.member("corpus", "stdlib")))
    x: Tensor = normal(2, 4, D)
    with pytest.raises(UserError, match="codec int8_static has no calibration table"):
        bare.fit(x, heads_of(2))
    for table, says in (
        ({1: torch.ones(2, D)}, "no layer 0"),
        ({0: torch.ones(2, 32)}, r"\(2, 32\) limits for 2 heads of 64"),
    ):
        with pytest.raises(UserError, match=says):
            bare.calibrated(Limits(table)).fit(x, heads_of(2))
