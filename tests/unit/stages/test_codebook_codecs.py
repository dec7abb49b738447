"""Codecs with codebooks, and channel pruning, against slow oracles written from their papers; rates as the papers state them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.codec.codebook import best_points, looked_up, midpoints
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.hadamard import matrix as hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.kvquant import KVQuant
from harness.stages.codec.packing import pack
from harness.stages.codec.think import Think
from harness.stages.codec.turboquant import TurboQuant, density_points, gaussian, rotation
from harness.stages.encoded import Heads
from harness.stages.limits import Codebooks
from tests.support import conf_tree
from tests.support.codec_rows import decode, heads_of, normal
from tests.support.oracles import codebooks as oracle

CPU, F64 = torch.device("cpu"), torch.float64

# --- codebooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "bits"), [(64, 1), (64, 4), (128, 2), (80, 3)])
def test_the_codebook_of_a_coordinate_is_lloyd_and_max_s(d: int, bits: int) -> None:
    """Every number is the mean of the density between the cuts around it; for this density only the best codebook is so."""
    points = density_points(d, bits)
    cuts = [-1.0, *midpoints(points).tolist(), 1.0]
    for point, (low, high) in zip(points.tolist(), pairwise(cuts), strict=True):
        assert point == pytest.approx(oracle.centroid(d, low, high), abs=1e-5)


def test_codebooks_of_the_paper() -> None:
    """For large d: one bit +-sqrt(2 / pi d), two bits +-0.453 and +-1.51 over sqrt(d)."""
    d = 4096
    assert (density_points(d, 1) * math.sqrt(d)).tolist() == pytest.approx([-0.798, 0.798], abs=5e-4)
    assert (density_points(d, 2) * math.sqrt(d)).tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-3)


def test_points_are_the_means_of_what_is_nearest_to_them() -> None:
    values = normal(4000).double().pow(3).sort().values
    weights = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=F64)
    points = best_points(values, weights, 8)
    owner = torch.bucketize(values, midpoints(points))
    for i, point in enumerate(points.tolist()):
        mine = owner == i
        assert point == pytest.approx(float((values * weights)[mine].sum() / weights[mine].sum()), abs=1e-9)
    assert best_points(torch.tensor([1.0, 2.0, 7.0]), torch.tensor([3.0, 1.0, 1.0]), 2).tolist() == [1.25, 7]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("d", [64, 13])
def test_packed_codes_are_looked_up_one_by_one(bits: int, d: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 5, d), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    points = normal(2**bits)
    assert torch.equal(looked_up(pack(codes, bits), bits, points, d), points[codes.long()])


# --- TurboQuant --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_rotations_are_orthogonal_and_follow_from_the_seed(kind: str) -> None:
    one = rotation(kind, 64, 3, F64, CPU)
    assert torch.allclose(one @ one.T, torch.eye(64, dtype=F64), atol=1e-12)
    assert not torch.allclose(one, rotation(kind, 64, 4, F64, CPU), atol=0.01)
    rotation.cache_clear()
    assert torch.equal(one, rotation(kind, 64, 3, F64, CPU))


@pytest.mark.parametrize("kind", ["qr", "hadamard"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", ["mse", "prod"])
def test_vectors_are_those_of_the_paper_s_algorithms(variant: str, bits: int, kind: str) -> None:
    x = normal(2, 6, 64) * torch.tensor([1.0, 50.0])[:, None, None]
    codec = TurboQuant(bits=bits, variant=variant, rotation=kind, seed=5)
    got = decode(codec, codec.encode(x), x).double()
    turn, s = rotation(kind, 64, 5, F64, CPU), gaussian(64, 5, F64, CPU)
    for h in range(2):
        for n in range(6):
            row = x[h, n].tolist()
            size = bits - (variant == "prod")
            points = density_points(64, size).tolist() if size else []
            if variant == "mse":
                want = oracle.turboquant_mse(row, turn, points)
            else:
                want = oracle.turboquant_prod(row, turn, points, s)
            assert torch.allclose(got[h, n], torch.tensor(want, dtype=F64), atol=1e-3 * float(x[h, n].norm()))


@pytest.mark.parametrize(("bits", "rate"), [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_the_error_is_the_paper_s_whatever_the_vectors(bits: int, rate: float) -> None:
    """Scalar Lloyd-Max rates of a Gaussian, below sqrt(3) pi / 2 / 4^bits; vectors with outlier channels have the same."""
    d = 128
    for x in (normal(1, 4000, d), normal(1, 4000, d) * torch.logspace(-2, 2, d)):
        off = decode(codec := TurboQuant(bits=bits), codec.encode(x), x) - x
        found = float((off.square().sum(-1) / x.square().sum(-1)).mean())
        assert found == pytest.approx(rate, rel=0.06)
        assert found < math.sqrt(3) * math.pi / 2 / 4**bits


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_products_have_the_right_mean_and_a_bounded_spread(bits: int) -> None:
    """E<q, x'> = <q, x>, and a spread of at most sqrt(3) pi^2 / d |q|^2 |x|^2 / 4^bits; the mse variant's products shrink."""
    d, tries = 64, 400
    x, q = normal(1, 1, d), normal(1, 1, d, seed=1)
    q = q + x  # products of some size
    true = float((q * x).sum())

    def products(variant: str) -> Tensor:
        codecs = (TurboQuant(bits=bits, variant=variant, seed=seed) for seed in range(tries))
        return torch.stack([(decode(codec, codec.encode(x), x) * q).sum() for codec in codecs])

    found = products("prod")
    bound = math.sqrt(3) * math.pi**2 / d * float(q.square().sum() * x.square().sum()) / 4**bits
    assert float((found - true).square().mean()) < bound
    spread = float(found.std()) / math.sqrt(tries)
    assert abs(float(found.mean()) - true) < 4 * spread
    if bits == 1:
        assert float(products("mse").mean()) == pytest.approx(2 / math.pi * true, rel=0.05)


def test_bytes_and_constants_by_hand() -> None:
    """Head dim 64, 16-bit cache: 4 bits 32 + 2; with a sign 24 + 8 + 4; one bit of sign 8 + 2. P 64 x 64 and 16 numbers."""
    for codec, size in (
        (TurboQuant(), 34),
        (TurboQuant(bits=3), 26),
        (TurboQuant(variant="prod"), 36),
        (TurboQuant(bits=1, variant="prod"), 10),
    ):
        assert sum(codec.nbytes(1, 1, 64, 2)) == size
        e = codec.encode(normal(2, 3, 64).half())
        assert sum(t.untyped_storage().nbytes() for t in e.tensors()) == 6 * size
    assert TurboQuant().fit(normal(1, 1, 64), heads_of(1)).info()["constants_bytes"] == 4 * (64 * 64 + 16)


# --- KVQuant -----------------------------------------------------------------------------------------------------

LOW, HIGH = -1.5 - torch.rand(4, 16, generator=torch.Generator().manual_seed(3)), torch.full((4, 16), 2.0)
POINTS = torch.tensor([-0.9, -0.4, -0.1, 0.0, 0.15, 0.3, 0.6, 0.95])
TABLE = Codebooks({0: HIGH[:2], 1: HIGH[2:]}, {}, {0: LOW[:2], 1: LOW[2:]}, {0: POINTS, 1: POINTS * 0.9})


def kvquant(role: str, **settings: Any) -> KVQuant:
    config = conf_tree.config("codec", "kvquant")["calibration"]
    codec = KVQuant(calibration=conf_tree.instantiate(config), bits=3, **settings).for_role(role)
    return codec.calibrated(TABLE).fit(torch.zeros(4, 1, 16), Heads((0, 1), 0, 2))


@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("role", ["keys", "values"])
def test_two_layers_of_two_heads_equal_the_oracle(role: str, share: float) -> None:
    x = normal(4, 20, 16)
    x[1, 7, 3], x[3, 2, 9] = 40.0, -9.0
    codec = kvquant(role, outliers=share)
    e = codec.encode(x)
    got, k = decode(codec, e, x).double(), max(1, round(share * 32))
    assert e.payload["outliers"].shape == e.payload["index"].shape == (2, 20, k)
    for layer in (0, 1):
        some, points = slice(2 * layer, 2 * layer + 2), TABLE.points[layer].tolist()
        if role == "keys":
            want = oracle.kvquant_keys(x[some], LOW[some], HIGH[some], points, k)
        else:
            want = oracle.kvquant_values(x[some], points, k)
        assert torch.allclose(got[some], want, atol=1e-5)
    exact = got == x.double()
    assert bool((exact.view(2, 2, 20, 16).sum((1, 3)) >= k).all())
    assert got[1, 7, 3] == 40 and got[3, 2, 9] == -9


def test_numbers_beyond_a_channel_s_range_are_counted_unless_they_are_exact() -> None:
    x = torch.zeros(4, 1, 16)
    x[0, 0, :3] = torch.tensor([3.0, 5.0, -4.0])
    assert int(kvquant("keys").encode(x).clipped) == 2
    assert int(kvquant("keys", outliers=0.1).encode(x).clipped) == 0
    assert kvquant("values").encode(x).clipped == 0


def test_bytes_of_a_layer_by_hand() -> None:
    """2 heads of 16, 3 bits, one exact number of 32, 10 tokens, 16-bit cache: codes 2 x 6, exact 2 + 1; values 4 for a range."""
    once = 4 * 8
    assert kvquant("keys").nbytes(2, 10, 16, 2) == (10 * (12 + 3), once + 8 * 32)
    assert kvquant("values").nbytes(2, 10, 16, 2) == (10 * (12 + 3), once + 10 * 4)
    wide = kvquant("values").nbytes(8, 10, 64, 2)[0]  # 512 numbers: 5 of them, with an index of 2 bytes
    assert wide == 10 * (8 * 24 + 5 * 4)


# --- ThinK -------------------------------------------------------------------------------------------------------


def test_channels_that_stay_have_the_largest_parts_of_the_scores() -> None:
    q, k = normal(3, 2, 40, 16, seed=1), normal(3, 50, 16) * torch.logspace(-0.5, 0.5, 16)
    codec = Think(ratio=0.4).observing(q, k).fit(k, heads_of(3))
    e = codec.encode(k)
    assert e.payload["tokens"].shape == (3, 50, 9)  # floor(0.6 x 16)
    got = decode(codec, e, k)
    for h, channels in enumerate(oracle.think_channels(q[:, :, -32:], k, 9)):
        gone = [c for c in range(16) if c not in channels]
        assert torch.equal(got[h][:, channels], k[h][:, channels])
        assert not bool(got[h][:, gone].any())


def test_what_is_left_goes_through_any_codec() -> None:
    x = normal(2, 64, 64)
    for inner in (Int8(), IntGroups(bits=4, axis="channel", residual=0), TurboQuant()):
        codec = Think(ratio=0.5, inner=inner).fit(x, heads_of(2))
        e = codec.encode(x)
        assert sum(t.untyped_storage().nbytes() for t in e.tensors()) == sum(codec.nbytes(2, 64, 64, 4))
        assert sum(codec.nbytes(2, 64, 64, 4)) == sum(inner.nbytes(2, 64, 32, 4)) + 2 * 8
        kept = decode(codec, e, x) != 0
        assert bool((kept.any(1).sum(-1) == 32).all())


# --- QuaRot ------------------------------------------------------------------------------------------------------


def test_turning_values_back_before_or_behind_attention_is_the_same() -> None:
    """The authors fuse the turn back into the output projection, behind the weighted sum; the sum is linear."""
    codec = Hadamard(inner=IntGroups(bits=4, axis="token", group=None, residual=0))
    v = normal(2, 40, 64)
    e, weights = codec.encode(v), normal(2, 5, 40, seed=1).softmax(-1)
    fused = weights @ decode(codec.inner, e, v) @ hadamard(64, torch.float32, CPU)
    torch.testing.assert_close(weights @ decode(codec, e, v), fused, atol=1e-5, rtol=1e-5)
    assert codec.nbytes(1, 1, 64, 2) == (32, 4)  # asymmetric, a token and head a group: 2 (d / 2 + 4) for keys and values


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (TurboQuant, {"bits": 5}, r"codec\.bits=5 is not possible: allowed are 1, 2, 3, 4"),
        (TurboQuant, {"variant": "best"}, r"codec\.variant='best' .* mse, prod, auto"),
        (TurboQuant, {"rotation": "none"}, r"codec\.rotation='none' .* qr, hadamard"),
        (TurboQuant, {"seed": -1}, r"codec\.seed=-1"),
        (KVQuant, {}, r"codec\.calibration=None is not possible"),
        (KVQuant, {"outliers": 0.5}, r"codec\.outliers=0\.5"),
        (KVQuant, {"bits": 8}, r"codec\.bits=8"),
        (Think, {"ratio": 1.0}, r"codec\.ratio=1\.0"),
        (Think, {"queries": 0}, r"codec\.queries=0"),
        (Think, {"inner": IntGroups()}, r"codec\.inner='int4' is not possible: one without calibration, residual or sinks"),
    ],
)
def test_settings_are_refused_in_one_line(kind: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


def test_head_dims_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(UserError, match=r"rotation='hadamard' .* head_dim 80: .* legal is qr"):
        TurboQuant(rotation="hadamard").check(80)
    TurboQuant().check(80)
    with pytest.raises(UserError, match=r"head_dim 2: it must be at least 4"):
        TurboQuant().check(2)
    with pytest.raises(UserError, match="of 2 channels none would stay"):
        Think(ratio=0.6).check(2)
    with pytest.raises(UserError, match="no calibration table"):
        replace(kvquant("keys"), table=None).fit(torch.zeros(2, 1, 16), heads_of(2))
