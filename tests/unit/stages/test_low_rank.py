"""Low rank and xKV against slow oracles from their papers, on random tensors; ranks, bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.bases import Bases, principal
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int8_static import Int8Static
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.low_rank import LowRank
from harness.stages.codec.xkv import XKV
from harness.stages.encoded import Heads
from harness.stages.keep import Keep
from harness.stages.rank import Rank
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.codec_rows import chunks, decode, heads_of, normal, storage, stored
from tests.support.oracles import low_rank as oracle

H, D, N = 4, 8, 60


def rank(value: float, unit: str = "numbers") -> Rank:
    return Rank(unit=unit, value=value)


def low_rank(x_HND: Tensor, value: float, layers: int = 1, unit: str = "numbers", **settings: Any) -> LowRank:
    """A codec with the bases of x itself."""
    each = len(x_HND) // layers
    s = settings.get("heads") or each
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in range(layers):
        sides = [side(some) for some in x_HND[layer * each : (layer + 1) * each].split(s)]  # type: ignore[no-untyped-call]
        found[layer] = principal(torch.stack([x.T @ x for x in sides]))
    bases = Bases({i: one[0] for i, one in found.items()}, {}, {i: one[1] for i, one in found.items()})
    return LowRank(**({"of": "weights", "rank": rank(value, unit)} | settings)).calibrated(bases)


def side(x_HND: Tensor) -> Tensor:
    """Heads side by side, [N, H * D], fp64."""
    return x_HND.double().transpose(0, 1).flatten(1)


def back(codec: Codec, x_HND: Tensor, heads: Heads) -> Tensor:
    fitted = codec.fit(x_HND, heads)
    return decode(fitted, fitted.encode(x_HND), x_HND)


# --- against the papers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3, 8])
def test_a_basis_of_a_text_is_palus_whitened_weight(q: int) -> None:
    """Whitening the weight by the inputs' second moments cuts what the weight makes of them, and nothing else."""
    inputs, weight = normal(N, 48).double(), normal(H * D, 48, seed=1).double()
    x_HND = (inputs @ weight.T).view(N, H, D).transpose(0, 1).float()
    want = inputs @ oracle.palu_whitened(inputs, weight, H * q).T
    torch.testing.assert_close(side(back(low_rank(x_HND, q), x_HND, heads_of(H))), want, atol=2e-4, rtol=1e-4)


def test_a_basis_of_the_weights_is_their_own_decomposition() -> None:
    inputs, weight = normal(N, 48).double(), normal(H * D, 48, seed=1).double()
    x_HND = (inputs @ weight.T).view(N, H, D).transpose(0, 1).float()
    vectors, energy = principal((weight @ weight.T)[None])
    codec = LowRank(rank=rank(3), of="weights").calibrated(Bases({0: vectors}, {}, {0: energy}))
    want = inputs @ oracle.truncated(weight, 3 * H).T
    torch.testing.assert_close(side(back(codec, x_HND, heads_of(H))), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, None])
def test_groups_of_heads_have_bases_of_their_own(heads: int | None) -> None:
    x, s = normal(2 * H, N, D), heads or H
    got = back(low_rank(x, 3, layers=2, heads=heads), x, heads_of(2 * H, 2))
    for at in range(0, 2 * H, s):
        want = oracle.truncated(side(x[at : at + s]), 3 * s)
        torch.testing.assert_close(side(got[at : at + s]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("layers", "n"), [(1, N), (3, N), (3, 5)])
def test_xkv_is_one_decomposition_of_layers_side_by_side(layers: int, n: int) -> None:
    x = normal(6 * 2, n, D)  # six layers of two heads
    got = back(XKV(rank=rank(2), layers=layers), x, heads_of(12, 6))
    for at in range(0, 6, layers):
        sides = [side(x[2 * i : 2 * i + 2]) for i in range(at, at + layers)]
        for i, want in enumerate(oracle.xkv(sides, 2 * 2 * layers), at):
            torch.testing.assert_close(side(got[2 * i : 2 * i + 2]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_at_full_rank_everything_comes_back(layers: int) -> None:
    x = normal(4, N, D)
    for codec in (low_rank(x, 8, layers), low_rank(x, 1.0, layers, "fraction", heads=1), XKV(rank=rank(8), layers=layers)):
        torch.testing.assert_close(back(codec, x, heads_of(4, layers)), x, atol=3e-6, rtol=1e-5)


def test_one_layer_of_a_group_decodes_by_itself() -> None:
    x = normal(12, N, D)
    codec = XKV(rank=rank(2), layers=3, inner=Int8()).fit(x, heads_of(12, 6))
    e = codec.encode(x)
    whole = decode(codec, e, x)
    for start, stop in ((0, 2), (2, 4), (4, 6), (5, 6), (4, 8), (6, 12)):
        assert torch.equal(decode(codec, e.heads(start, stop), x[start:stop]), whole[start:stop])
    assert torch.equal(decode(codec, e.heads(2, 6).heads(1, 3), x[3:5]), whole[3:5])
    assert torch.equal(decode(codec, e.newest(7), x[:, -7:]), whole[:, -7:])


# --- ranks -------------------------------------------------------------------------------------------------------


def test_ranks_are_numbers_fractions_bytes_or_energy() -> None:
    assert LowRank(rank=rank(5), of="weights").numbers(8, 2) == 5
    assert LowRank(rank=rank(0.7, "fraction"), of="weights").numbers(8, 2) == 5
    assert LowRank(rank=rank(11, "bytes"), of="weights").numbers(8, 2) == 5
    assert LowRank(rank=rank(11, "bytes"), of="weights", inner=Int8()).numbers(64, 2) == 9  # and a scale of two bytes
    groups = IntGroups(bits=4, group=16, axis="token", residual=0)
    assert LowRank(rank=rank(0.7, "fraction"), of="weights", inner=groups).numbers(64, 2) == 32  # whole groups of 16
    assert LowRank(rank=rank(40, "bytes"), of="weights", inner=groups).numbers(64, 2) == 48  # 24 + 3 * (2 + 2), not 64: 48


def test_energy_is_the_mean_share_over_all_layers() -> None:
    energy = {0: torch.tensor([[6.0, 2.0, 1.0, 1.0]]), 1: torch.tensor([[4.0, 4.0, 1.0, 1.0]])}
    bases = Bases({i: torch.eye(4)[None] for i in energy}, {}, energy)  # two heads of two: 0.5, 0.8, 0.9, 1 are held
    for value, q in ((0.5, 1), (0.8, 1), (0.81, 2), (1.0, 2)):
        assert LowRank(rank=rank(value, "energy"), of="weights").calibrated(bases).numbers(2, 2) == q
    with pytest.raises(UserError, match="legal are numbers, fraction, bytes"):
        LowRank(rank=rank(0.5, "energy"), of="weights").numbers(2, 2)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inner", [Exact(), Int8(), IntGroups(bits=4, group=None, axis="token", residual=0)])  # type: ignore[abstract]
def test_bytes_are_coefficients_a_token_and_the_basis_once(inner: Codec, dtype: torch.dtype) -> None:
    x, size = normal(12, N, D).to(dtype), dtype.itemsize
    each = {"exact": 4 * size, "int8": 4 + size}.get(inner.name, 2 + 2 * size)
    for codec, s in ((low_rank(x, 4, 6, inner=inner), 2), (XKV(rank=rank(4), layers=3, inner=inner), 6)):
        e = codec.fit(x, heads_of(12, 6)).encode(x)
        assert storage(e.tensors()) == 12 * (N * each + D * s * 4 * size)
        assert sum(codec.nbytes(2, N, D, size)) == 2 * (N * each + D * s * 4 * size)


def test_tokens_after_the_prompt_stay_exact_under_xkv_alone() -> None:
    x = normal(4, 40, D)
    late = stored(XKV(rank=rank(2), layers=1), x, [30, *chunks(10, 1)])
    assert late.n_encoded == 30
    assert late.tail_HND is not None
    assert torch.equal(late.tail_HND, x[:, 30:])
    assert stored(low_rank(x, 2), x, [30, *chunks(10, 1)]).n_encoded == 40


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (lambda: Rank(unit="share", value=0.5), "allowed are numbers, fraction, bytes, energy"),
        (lambda: Rank(unit="fraction", value=1.5), "at most 1"),
        (lambda: Rank(unit="numbers", value=2.5), "a positive whole number"),
        (lambda: LowRank(rank=rank(2)), "codec.of=text needs it"),
        (lambda: LowRank(rank=rank(2), of="noise"), "allowed are text, weights"),
        (lambda: LowRank(rank=rank(2), of="weights", heads=0), "codec.heads"),
        (lambda: LowRank(rank=rank(9), of="weights").check(8), "heads have 8 channels"),
        (lambda: LowRank(rank=rank(2), of="weights", heads=2).check_heads(3, 30), "legal are 1, 3, or null"),
        (lambda: LowRank(rank=rank(2), of="weights", inner=IntGroups(residual=32)), "residual"),
        (lambda: LowRank(rank=rank(2), of="weights", inner=Int8Static(scale="unit", sinks=2)), "sinks"),
        (lambda: XKV(rank=rank(0.9, "energy")), "known before the prompt"),
        (lambda: XKV(rank=rank(2), layers=4).check_heads(3, 30), "legal are 1, 2, 3, 5, 6, 10, 15, 30"),
    ],
)
def test_what_cannot_be_says_what_can(codec: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        codec()


def test_heads_that_share_coefficients_are_not_evicted_apart() -> None:
    together, apart = (LowRank(rank=rank(2), of="weights", heads=heads) for heads in (None, 1))
    by_position: Keep = conf_tree.keep("streaming", 24)
    for keep in (conf_tree.keep("snapkv", 60), conf_tree.keep("knorm", 24)):
        with pytest.raises(UserError, match="must hold the same tokens; legal are a keep by position"):
            Stack(keep=keep, values=together)
        Stack(keep=keep, values=apart)
    Stack(keep=by_position, values=together)
    Stack(keep=by_position, values=XKV(rank=rank(2)))
    Stack(keep=conf_tree.keep("h2o", 60), phase="always", values=apart)


def test_a_basis_that_outweighs_a_short_context_is_stored_all_the_same() -> None:
    """Storage is packed: only what a token takes says whether numbers were saved."""
    engine = tiny_models.engine("llama")
    codec = XKV(rank=rank(0.5, "fraction"), layers=3)
    row = engine.compress(engine.prefill(tiny_models.ids(20)), Stack(values=codec))
    full = engine.shape.full_bytes(20, 4)
    assert row.bytes().total > full
    assert (row.storage, row.codec_info()["values"]["once_bytes"]) == ("packed", 3 * 2 * 32 * 3 * 2 * 16 * 4)
    assert row.codec_info()["values"]["once_bytes_per_token"] == 3 * 2 * 32 * 3 * 2 * 16 * 4 / 20
