"""Every codec of conf/codec and its settings: codes equal exact arithmetic, errors stay in their bound, bytes equal the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.fixed_scale import FixedScale
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.encoded import Encoded, TokenIndex
from tests.support.codec_rows import (
    CODECS,
    DTYPES,
    LOSSY,
    D,
    chunks,
    decode,
    encoded,
    fitted,
    heads_of,
    normal,
    roundtrip,
    storage,
    stored,
)
from tests.support.oracles import codec as oracle

DYNAMIC = [name for name in LOSSY if isinstance(CODECS[name], IntGroups | Int8)]
STEPPED = [name for name in LOSSY if isinstance(CODECS[name], IntGroups | Int8 | FixedScale | Hadamard)]
FIXED = [name for name in LOSSY if isinstance(CODECS[name], FixedScale)]


def unpacked(codes: Tensor, bits: int, d: int) -> Tensor:
    """Plain unpacking, by division: byte // 2^(bits * i) mod 2^bits; three bits are two and one."""
    if bits == 3:
        low = -(-d // 4)
        return unpacked(codes[..., :low], 2, d) + 4 * unpacked(codes[..., low:], 1, d)
    per = 8 // bits
    whole = codes.long()[..., None] // torch.tensor([2 ** (bits * i) for i in range(per)]) % 2**bits
    found: Tensor = whole.flatten(-2)[..., :d]
    return found


def expected(codec: Codec, x_HND: Tensor, layers: int) -> oracle.Coded:
    if isinstance(codec, Int8):
        return oracle.int8_per_token(x_HND, x_HND.dtype)
    assert isinstance(codec, IntGroups)
    group = codec.group or x_HND.shape[2]
    return oracle.int_groups(x_HND, codec.bits, group, codec.axis, codec.symmetric, x_HND.dtype, layers)


def codes_of(codec: Codec, e: Encoded, d: int) -> Tensor:
    return unpacked(e.payload["codes"], codec.bits, d) if isinstance(codec, IntGroups) else e.payload["codes"].long()


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
@pytest.mark.parametrize("name", DYNAMIC)
def test_codes_and_metadata_equal_exact_arithmetic(name: str, dtype: torch.dtype) -> None:
    x = (normal(2, 32, 32) * torch.logspace(-2, 2, 32)).to(dtype)
    codec = fitted(CODECS[name], x)
    e, want = codec.encode(x), expected(codec, x, 1)
    scale = e.metadata["scale"].flatten()
    if dtype == torch.float32:  # fp32 division cannot say which way it rounded: one step off is allowed
        steps = (scale.view(torch.int32) - want.scale.flatten().view(torch.int32)).abs()
        assert int(steps.max()) <= 1
    else:
        assert torch.equal(scale, want.scale.flatten())
    assert scale.dtype == dtype
    assert ("min" in e.metadata) == (want.minimum is not None)
    if want.minimum is not None:
        assert torch.equal(e.metadata["min"].flatten(), want.minimum.flatten())
    codes = codes_of(codec, e, 32)
    same_codes(codes, want)
    got = decode(codec, e, x, torch.float32).double()
    wrong = ((got - want.decoded).abs() * (codes == want.codes)).max()
    assert float(wrong) <= 1e-6 * float(want.decoded.abs().max())


@pytest.mark.parametrize("name", FIXED)
def test_codes_of_constant_scales_equal_exact_arithmetic(name: str) -> None:
    x = normal(4, 40, D)[:, :, :16].contiguous()
    x[0, 39, 3], x[3, 35, 0] = 30.0, -1e6
    codec = fitted(CODECS[name], x[:, :32], layers=2)
    assert isinstance(codec, FixedScale)
    e = codec.encode(x)
    got, clipped = decode(codec, e, x, torch.float32), 0
    for h in range(4):
        for d in range(16):
            scale = oracle.Fraction(1)
            if e.shared:
                kept = e.shared["scale"][h]
                scale = oracle.Fraction(kept[d % len(kept)].item())
            for n in range(40):
                value = oracle.Fraction(x[h, n, d].item())
                if isinstance(codec, Float8):
                    code, over = oracle.float8(value / scale, codec.format)
                else:
                    code, over = oracle.int8_code(value, scale)
                clipped += over
                assert got[h, n, d].item() == pytest.approx(float(code * scale), rel=1e-6, abs=0)
    assert int(e.clipped) == clipped > 0 or codec.scale == "unit"


@pytest.mark.parametrize("name", [n for n in FIXED if CODECS[n].scale != "unit"])
def test_constant_scales_hold_the_limits_they_were_fixed_on(name: str) -> None:
    x = normal(4, 32, 16) * torch.logspace(-3, 3, 16)
    x[0, :, 5] = 0
    codec = fitted(CODECS[name], x, layers=2)
    assert isinstance(codec, FixedScale)
    seen = x if codec.scale == "calibrated" else x[:, : codec.first]
    (scale,) = codec.encode(x).shared.values()
    limit = seen.abs().amax(1)
    wanted = {"channel": limit, "head": limit.amax(1, True), "tensor": limit.view(2, -1).amax(1, True).repeat_interleave(2, 0)}
    assert scale.shape == wanted[codec.axis].shape
    for got, want in zip(scale.flatten(), wanted[codec.axis].flatten(), strict=True):
        exact = float(oracle.fixed_scale(want.item(), codec.top))
        assert exact <= got.item() * (1 + 2**-23)
        assert got.item() == pytest.approx(exact, rel=2**-22)
    assert int(codec.encode(seen).clipped) == 0


def bound(codec: Codec, x_HND: Tensor, e: Encoded) -> Tensor:
    """Largest error of each element that the codec's docstring states, before the output is rounded."""
    x = x_HND.float()
    if isinstance(codec, Int8):
        return e.metadata["scale"].float().expand_as(x) / 2
    if isinstance(codec, IntGroups):
        step = e.metadata["scale"].float() * (2 if codec.bits == 1 else 1)
        step = step.repeat_interleave(codec.block, 1)
        return (step.repeat_interleave(codec.group or x.shape[2], 2) if codec.axis == "token" else step.expand_as(x)) / 2
    assert isinstance(codec, FixedScale)
    scale = e.shared["scale"][:, None] if e.shared else torch.ones(1)
    inside = x.abs() <= scale * codec.top * (1 + 1e-6)
    if isinstance(codec, Float8):
        relative, smallest = (1 / 16, 2.0**-10) if codec.format == "e4m3" else (1 / 8, 2.0**-17)
        allowed = torch.maximum(x.abs() * relative, scale * smallest)
    else:
        allowed = (scale / 2).expand_as(x)
    return torch.where(inside, allowed, x.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STEPPED)
def test_the_error_is_within_its_stated_bound(name: str, dtype: torch.dtype) -> None:
    x = (normal(4, max(CODECS[name].flush * 2, 32), D) + 3).to(dtype)
    codec = fitted(CODECS[name], x, 2)
    e = codec.encode(x)
    off = (decode(codec, e, x, torch.float32) - x.float()).abs()
    room = 1e-5 * x.float().abs().max()
    if isinstance(codec, Hadamard):  # a row's error keeps its length when it is turned back
        y = (x.float() @ torch.tensor(oracle.hadamard(D)).float() / D**0.5).to(dtype)
        rounding = y.float().abs() * {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
        allowed = (bound(codec.inner, y, e) + rounding + room).norm(dim=-1)
        assert bool((off.norm(dim=-1) <= allowed).all())
    else:
        assert bool((off <= bound(codec, x, e) * 1.0001 + room).all())


def test_exact_rows_come_back_bit_for_bit() -> None:
    for dtype in DTYPES:
        x = normal(2, 7, D).to(dtype)
        assert torch.equal(roundtrip(Exact(), x), x)


def test_a_hadamard_row_by_hand() -> None:
    codec = Hadamard(inner=Exact())
    (row,) = codec.encode(torch.tensor([[[2.0, 4.0, 6.0, 8.0]]])).payload["tokens"]
    assert row.tolist() == [[10, -2, -4, 0]]  # sums with signs ++++, +-+-, ++--, +--+, over sqrt(4)
    x = normal(2, 5, D)
    got = encoded(codec, x).payload["tokens"]
    assert torch.allclose(got.double(), x.double() @ torch.tensor(oracle.hadamard(D)).double() / 8, atol=1e-6)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_the_storages_and_the_formula(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    for d in (64, 128 if isinstance(codec, Hadamard) else 96):
        codec.check(d)
        for n in (1, 31, 32, 33, 64, 100, 128, 200, 261):  # groups filled and not filled
            rows = stored(codec, normal(4, n, d).to(dtype), [n])
            assert rows.n_encoded == codec.leaving(n, 0)
            assert rows.tail_HND is not None
            tail = 4 * (n - rows.n_encoded) * d * dtype.itemsize
            assert storage([rows.tail_HND]) == tail
            payload, metadata = codec.nbytes(4, rows.n_encoded, d, dtype.itemsize)
            if not rows.chunks:
                assert payload == metadata == 0
                continue
            e = rows.whole
            assert storage([*e.payload.values()]) == payload
            assert storage([*e.metadata.values(), *e.shared.values()]) == metadata
            assert storage([*e.tensors(), rows.tail_HND]) == payload + metadata + tail
            assert sum(t.numel() * t.element_size() for t in e.tensors()) == payload + metadata


def test_constants_of_a_head_are_held_once_however_often_rows_came() -> None:
    rows = stored(CODECS["int8-frozen-channel"], normal(2, 160, D), chunks(160, 16))
    assert len(rows.chunks) == 10
    parts = [t for chunk in rows.chunks for t in chunk.tensors()]
    assert storage(parts) == 2 * 160 * D + 2 * D * 4


def test_bytes_an_odd_width_is_padded_and_counted() -> None:
    for bits, width in ((4, 17), (3, 9 + 5), (2, 9), (1, 5)):
        codec = IntGroups(bits=bits, group=4, axis="channel", residual=0)
        assert codec.encode(normal(1, 4, 33)).payload["codes"].shape == (1, 4, width)
        assert codec.nbytes(1, 4, 33, 4)[0] == 4 * width


# --- chunking ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_case_11_codes_do_not_depend_on_the_calls(name: str) -> None:
    codec = CODECS[name]
    for n, dtype in ((288, torch.float16), (299, torch.bfloat16)):
        x = normal(2, n, D).to(dtype)
        once = stored(codec, x, [n])
        for calls in (chunks(n, 32), chunks(n, 7), chunks(n, 1), [60, *chunks(n - 60, 13)]):
            rows = stored(codec, x, calls)
            assert rows.tail_HND is not None
            assert once.tail_HND is not None
            assert torch.equal(rows.tail_HND, once.tail_HND)
            one, many = once.whole, rows.whole
            for group in ("payload", "metadata", "shared"):
                for key, tensor in getattr(one, group).items():
                    assert torch.equal(getattr(many, group)[key], tensor), key
            assert int(many.clipped) == int(one.clipped)
            assert torch.equal(decode(rows.codec, many, x[:, : many.n]), decode(once.codec, one, x[:, : one.n]))


@pytest.mark.parametrize("name", CODECS)
def test_the_tail_equals_the_oracle_and_is_exact(name: str) -> None:
    codec = CODECS[name]
    for n in (1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300):
        x = normal(1, n, D)
        rows = stored(codec, x, chunks(n, 13))
        assert rows.tail_HND is not None
        assert torch.equal(rows.tail_HND, x[:, rows.n_encoded :])
        if isinstance(codec, IntGroups) and codec.flush_tokens is None:
            axis = "token" if codec.block == 1 else "channel"
            assert rows.n_encoded == oracle.encoded_tokens(n, codec.residual, codec.group or 1, axis)


def test_case_10_kivi_as_published() -> None:
    keys, values = CODECS["kivi2-keys"], CODECS["kivi2-values"]
    for prompt, exact_keys, exact_values in ((100, 100, 100), (128, 0, 128), (300, 300 % 128, 128)):
        x = normal(2, prompt, D)
        for codec, exact in ((keys, exact_keys), (values, exact_values)):
            rows = stored(codec, x, [prompt])
            assert rows.tail_HND is not None
            assert torch.equal(rows.tail_HND, x[:, prompt - exact :])
    x = normal(2, 300 + 40 + 60, D)
    rows = stored(keys, x, [300, 40, *[1] * 60])  # a question of 40 tokens jumps over nothing: 340, then 384 are crossed
    assert rows.n_encoded == 384
    assert [chunk.n for chunk in rows.chunks] == [256, 128]


# --- heads and rows are cut apart --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_cut_heads_decode_by_themselves(name: str) -> None:
    x = normal(4, max(CODECS[name].flush * 2, 32), D)
    codec = fitted(CODECS[name], x, 2)
    e = codec.encode(x)
    whole = decode(codec, e, x)
    for start, stop in ((0, 2), (2, 4) if codec.joint else (3, 4)):
        assert torch.equal(decode(codec, e.heads(start, stop), x[start:stop]), whole[start:stop])
    cut = 2 if codec.joint else 1  # heads of a layer that are encoded together are never parted
    assert torch.equal(decode(codec, Encoded.stack([e.heads(0, cut), e.heads(cut, 4)]), x), whole)


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n].block == 1 and not CODECS[n].joint])
def test_rows_are_taken_as_they_were_encoded(name: str) -> None:
    x = normal(2, 64, D)
    codec = fitted(CODECS[name], x)
    index = torch.tensor([[0, 3, 40, 62, 70], [1, 2, 3, 63, 69]])
    newer = normal(2, 8, D, seed=1)
    e, later = codec.encode(x), codec.encode(newer)
    both = torch.cat((decode(codec, e, x), decode(codec, later, newer)), 1)
    got = decode(codec, e.take(TokenIndex(index), later), x[:, :5])
    assert torch.equal(got, both.gather(1, index[:, :, None].expand(-1, -1, D)))


def test_one_tensor_scale_serves_the_heads_of_a_layer() -> None:
    x = normal(4, 32, D) * torch.tensor([1.0, 10.0, 100.0, 1.0])[:, None, None]
    for codec in (IntGroups(bits=8, axis="tensor", symmetric=True, residual=0), CODECS["int8-frozen-tensor"]):
        e = codec.fit(x, heads_of(4, 2)).encode(x)
        scale = (e.metadata or e.shared)["scale"].flatten(1)
        assert torch.equal(scale[0], scale[1])
        assert torch.equal(scale[2], scale[3])
        assert not torch.equal(scale[1], scale[2])
