"""Every codec of conf/codec and its settings: codes equal exact arithmetic, bytes equal the formula, extremes stay finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kv.layer import Side
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.encoded import Encoded
from harness.stages.protocols import Codec
from harness.types import UserError
from tests import conf_tree
from tests.oracles import codec as oracle

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32]
D = 64


def variants() -> dict[str, Codec]:
    """Every member of conf/codec for keys and for values, then integer groups of other widths, axes and sizes."""
    found = {
        f"{n}-{r}": conf_tree.member("codec", n).for_role(r) for n in conf_tree.members("codec") for r in ("keys", "values")
    }
    for bits in (2, 4, 8):
        for axis in ("channel", "token"):
            for group, residual in ((32, 0), (16, 5), (8, 32)):
                name = f"int{bits}-{axis}-{group}-{residual}"
                found[name] = IntGroups(name=name, bits=bits, axis=axis, group=group, residual=residual)
    return found


CODECS = variants()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(codec: Codec, x_HND: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(x_HND.shape, dtype=dtype or x_HND.dtype)
    codec.decode(codec.encode(x_HND), out)
    return out


def groups(codec: Codec) -> Any:
    assert isinstance(codec, IntGroups)
    return codec


def unpack(codes: Tensor, bits: int, d: int) -> Tensor:
    """Plain unpacking, by division: byte // 2^(bits * i) mod 2^bits."""
    per = 8 // bits
    whole = codes.long()[..., None] // torch.tensor([2 ** (bits * i) for i in range(per)]) % 2**bits
    found: Tensor = whole.flatten(-2)[..., :d]
    return found


def expected(codec: Codec, x_HND: Tensor) -> oracle.Coded:
    if isinstance(codec, Int8):
        return oracle.int8_per_token(x_HND, x_HND.dtype)
    g = groups(codec)
    return oracle.int_asym(x_HND, g.bits, g.group, g.axis, x_HND.dtype)


def codes_of(codec: Codec, e: Encoded, d: int) -> Tensor:
    return e.payload["codes"].long() if isinstance(codec, Int8) else unpack(e.payload["codes"], groups(codec).bits, d)


def same_codes(found: Tensor, coded: oracle.Coded) -> None:
    """Equal, but for quotients within one fp32 step of a half, which fp32 may round the other way."""
    differ = found != coded.codes
    fraction = (coded.quotient - coded.quotient.floor() - 0.5).abs()
    near = fraction <= coded.quotient.abs().clamp(min=1) * 2.0**-22
    assert not bool((differ & ~near).any())
    assert int((found - coded.codes).abs().max()) <= 1
    assert float(differ.double().mean()) < 0.02


# --- codes and metadata ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].lossy])
def test_codes_and_metadata_equal_exact_arithmetic(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    x = (normal(2, 32, D) * torch.logspace(-2, 2, D)).to(dtype)
    e, want = codec.encode(x), expected(codec, x)
    scale = e.metadata["scale"].flatten()
    if dtype == torch.float32:  # fp32 division cannot say which way it rounded: one step off is allowed
        steps = (scale.view(torch.int32) - want.scale.flatten().view(torch.int32)).abs()
        assert int(steps.max()) <= 1
    else:
        assert torch.equal(scale, want.scale.flatten())
    assert scale.dtype == dtype
    if want.minimum is not None:
        assert torch.equal(e.metadata["min"].flatten(), want.minimum.flatten())
    same_codes(codes_of(codec, e, D), want)
    exactly = (codes_of(codec, e, D) == want.codes) * 1.0
    got = torch.empty(x.shape, dtype=torch.float32)
    codec.decode(e, got)
    wrong = ((got.double() - want.decoded).abs() * exactly).max()
    assert float(wrong) <= 1e-6 * float(want.decoded.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].lossy])
def test_the_error_is_at_most_half_a_step(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    x = (normal(2, 64, D) + 3).to(dtype)
    e = codec.encode(x)
    got = torch.empty(x.shape, dtype=torch.float32)
    codec.decode(e, got)
    step = e.metadata["scale"].float()
    if isinstance(codec, IntGroups):
        step = step.repeat_interleave(codec.group, 1 if codec.axis == "channel" else 2)
    assert bool(((got - x.float()).abs() <= step * 0.5001 + 1e-6 * x.float().abs().max()).all())


def test_exact_rows_come_back_bit_for_bit() -> None:
    for dtype in DTYPES:
        x = normal(2, 7, D).to(dtype)
        assert torch.equal(decoded(Exact(), x), x)


# --- bytes -------------------------------------------------------------------------------------------------------


def storage(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_the_storages_and_the_formula(name: str, d: int, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    codec.check(d)
    for blocks in (1, 2, 5):
        n = blocks * max(codec.block, 1)
        e = codec.encode(normal(3, n, d).to(dtype))
        payload, metadata = storage([*e.payload.values()]), storage([*e.metadata.values()])
        assert (payload, metadata) == codec.nbytes(3, n, d, dtype.itemsize)
        assert e.n == n
        assert storage(e.tensors()) == sum(t.numel() * t.element_size() for t in e.tensors())


def test_bytes_an_odd_width_is_padded_and_counted() -> None:
    codec = IntGroups(bits=4, group=4, axis="channel", residual=0)
    e = codec.encode(normal(1, 4, 33))
    assert e.payload["codes"].shape == (1, 4, 17)
    assert codec.nbytes(1, 4, 33, 4)[0] == 4 * 17


# --- chunking ----------------------------------------------------------------------------------------------------


def stored(codec: Codec, x_HND: Tensor, calls: list[int], view: torch.dtype | None = None) -> Side:
    side, at = Side.of(x_HND[:, : calls[0]].clone(), codec, view), calls[0]
    for n in calls[1:]:
        side, at = side.append(x_HND[:, at : at + n].clone()), at + n
    assert at == x_HND.shape[1]
    return side


def chunks(n: int, size: int) -> list[int]:
    return [min(size, n - at) for at in range(0, n, size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_case_11_codes_do_not_depend_on_the_calls(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    for n in (96, 101):
        x = normal(2, n, D).to(dtype)
        once = stored(codec, x, [n])
        for calls in (chunks(n, 32), chunks(n, 7), chunks(n, 1), [60, *chunks(n - 60, 1)]):
            side = stored(codec, x, calls)
            assert side.n == n
            assert torch.equal(side.tail_HND, once.tail_HND)
            whole, single = side.chunks[0], once.chunks[0]
            for chunk in side.chunks[1:]:
                whole = whole.cat(chunk)
            for key, tensor in {**single.payload, **single.metadata}.items():
                assert torch.equal({**whole.payload, **whole.metadata}[key], tensor), key
            assert torch.equal(side.read(torch.float32), once.read(torch.float32))


@pytest.mark.parametrize("name", CODECS)
def test_the_tail_equals_the_oracle_and_is_exact(name: str) -> None:
    codec = CODECS[name]
    if not isinstance(codec, IntGroups):
        assert stored(codec, normal(1, 9, D), [9]).tail_HND.shape[1] == 0
        return
    for n in (1, 31, 32, 33, 63, 64, 65, 100):
        x = normal(1, n, D)
        side = stored(codec, x, chunks(n, 13))
        encoded = oracle.encoded_rows(n, codec.residual, codec.group, codec.axis)
        assert side.n_encoded == encoded
        assert torch.equal(side.tail_HND, x[:, encoded:])
        assert torch.equal(side.read(torch.float32)[:, encoded:], x[:, encoded:])


# --- extremes ----------------------------------------------------------------------------------------------------


def test_case_1_outlier_channel_per_channel_and_per_token() -> None:
    x = normal(1, 64, 64)
    x[:, :, 7] += 100
    others = [c for c in range(64) if c != 7]

    def error(axis: str) -> float:
        codec = IntGroups(bits=4, group=64 if axis == "token" else 32, axis=axis, residual=0)
        off = (decoded(codec, x) - x)[:, :, others]
        return float(off.square().mean().sqrt() / x[:, :, others].square().mean().sqrt())

    assert error("channel") == pytest.approx(0.09, abs=0.02)
    assert error("token") == pytest.approx(2.30, abs=0.25)
    assert IntGroups().for_role("keys").axis == "channel"
    assert IntGroups().for_role("keys").info()["axis"] == "channel"
    assert IntGroups().for_role("values").info()["axis"] == "token"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].lossy])
def test_case_3_zeros_decode_to_zero_and_leave_neighbours_alone(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    assert torch.equal(decoded(codec, torch.zeros(2, 32, D, dtype=dtype)), torch.zeros(2, 32, D, dtype=dtype))
    x = normal(2, 64, D).to(dtype)
    half = x.clone()
    half[0, :32, :32] = 0
    got, want = decoded(codec, half), decoded(codec, x)
    assert bool(torch.isfinite(got).all())
    if isinstance(codec, IntGroups):
        assert not bool(got[0, :32, :32].any())
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0, 32:], want[0, 32:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in CODECS if isinstance(CODECS[n], IntGroups)])
def test_a_constant_group_is_exact(name: str, dtype: torch.dtype) -> None:
    x = torch.full((1, 32, D), 3.140625, dtype=dtype)
    assert torch.equal(decoded(CODECS[name], x), x)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_case_4_bf16_beyond_the_range_of_fp16(axis: str) -> None:
    x = normal(1, 32, 64).clamp(-1, 1)
    x[0, 3, 5] = -70000
    x = x.to(torch.bfloat16)
    codec = IntGroups(bits=4, group=32, axis=axis, residual=0)
    for dtype in (torch.bfloat16, torch.float32):
        got = decoded(codec, x, dtype).float()
        assert bool(torch.isfinite(got).all())
        assert float((got - x.float()).abs().max()) <= 70001 / 15 / 2 + 70000 * 2**-7


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_extremes_of_fp16_stay_finite(name: str, out: torch.dtype) -> None:
    codec = CODECS[name]
    top, tiny = 65504.0, 2.0**-24
    x = torch.tensor([[top, -top, 1.0, tiny], [top, top - 32, 0, 0], [tiny, -tiny, 0, tiny], [-top, 1, 2, 3]])
    x = x.repeat(8, D // 4)[None].half()  # all of it in every block of 32 tokens and of 32 channels
    got = decoded(codec, x, out).float()
    assert bool(torch.isfinite(got).all())
    step = {8: 2 * top / 255, 4: 2 * top / 15, 2: 2 * top / 3}[int(codec.info().get("bits", 8))]  # type: ignore[call-overload]
    assert float((got - x.float()).abs().max()) <= step / 2 * 1.02 + top * 2**-7


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].lossy])
def test_case_6_one_head_does_not_see_another(name: str) -> None:
    codec = CODECS[name]
    x = normal(2, 32, D)
    loud = torch.stack([x[0], x[1] * 1000])
    for a, b in zip(codec.encode(x).tensors(), codec.encode(loud).tensors(), strict=True):
        assert torch.equal(a[0], b[0])


def test_case_12_keys_and_values_have_their_own_scales_and_nothing_is_clipped() -> None:
    keys, values = normal(1, 16, D) * 50, normal(1, 16, D) * 0.5
    for x in (keys, values):
        assert float((decoded(Int8(), x) - x).abs().max()) <= float(x.abs().max()) / 127 * 0.51
    assert Int8().info()["scale"] == "dynamic"
    assert Int8().info()["clipped"] == 0.0


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bits": 3}, r"codec\.bits=3 is not possible: allowed are 2, 4 and 8"),
        ({"group": 0}, r"codec\.group=0 is not possible"),
        ({"group": -1}, r"codec\.group=-1"),
        ({"group": 1}, r"codec\.group=1 "),
        ({"group": "32"}, r"codec\.group='32'"),
        ({"axis": "row"}, r"codec\.axis='row' is not possible: allowed are"),
        ({"residual": -1}, r"codec\.residual=-1"),
    ],
)
def test_settings_are_refused_in_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        IntGroups(**settings)


def test_case_5_a_group_that_does_not_divide_the_head() -> None:
    for d in (96, 80):
        with pytest.raises(UserError, match=rf"codec\.group=64 is not possible: it must divide head_dim {d}: allowed are"):
            IntGroups(group=64, axis="token").check(d)
        IntGroups(group=64, axis="channel").check(d)
