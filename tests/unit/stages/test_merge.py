"""Every merge equals its slow oracle on random tensors; what receives nothing keeps its bits; settings are checked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.configure.typed import build
from harness.errors import UserError
from harness.stages.merge.cam import CaM
from harness.stages.merge.d2o import D2O
from harness.stages.merge.kvmerger import KVMerger
from harness.stages.merge.lookm import LookM
from harness.stages.merge.parting import Merged, Parting
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.oracles import merge as oracle

H, N, D = 3, 40, 6


def parting(m: int, seed: int, *, alike: float = 0.0, state: Tensor | None = None) -> Parting:
    """Random tokens of which m stay, others in each head. alike: how much of each token is what all have."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(H, N, D, generator=g) + alike * torch.randn(H, 1, D, generator=g) for _ in range(2))
    order = torch.rand(H, N, generator=g).argsort(-1)
    stay, go = order[:, :m].sort(-1).values, order[:, m:].sort(-1).values
    draws, sums = torch.rand(H, N - m, generator=g), torch.rand(H, N, generator=g) ** 2
    return Parting(k, v, stay, go, draws, sums, state)


def compare(found: Merged, one: Parting, h: int, wanted: tuple[oracle.Found | None, oracle.Found, int]) -> None:
    """One head of a merge and of its oracle; the tokens that received something are the same ones."""
    stay = one.stay_HM[h].tolist()
    assert int(found.given_H[h]) == wanted[2]
    for new, old, side in ((found.k_HMD, one.k_HND, wanted[0]), (found.v_HMD, one.v_HND, wanted[1])):
        if side is None:
            assert new is None, "this side stays as it was"
            continue
        assert new is not None
        assert [c for c, took in zip(stay, found.took_HM[h].tolist(), strict=True) if took] == sorted(side)
        for at, c in enumerate(stay):
            torch.testing.assert_close(new[h, at], torch.tensor(side.get(c, old[h, c].tolist())), atol=2e-6, rtol=2e-6)


def plain(x: Tensor, h: int) -> list[list[float]]:
    return x[h].double().tolist()  # type: ignore[no-any-return]


sizes = pytest.mark.parametrize(("m", "seed"), [(1, 0), (7, 1), (20, 2), (39, 3)])


@sizes
@pytest.mark.parametrize("threshold", [-1.0, 0.3])
def test_lookm(m: int, seed: int, threshold: float) -> None:
    one = parting(m, seed)
    found = LookM(threshold=threshold).merge(one)
    for h in range(H):
        stay, go = one.stay_HM[h].tolist(), one.go_HE[h].tolist()
        compare(found, one, h, oracle.lookm(plain(one.k_HND, h), plain(one.v_HND, h), stay, go, threshold))


@sizes
@pytest.mark.parametrize("before", [None, 0.5])
def test_d2o(m: int, seed: int, before: float | None) -> None:
    one = parting(m, seed, state=None if before is None else torch.full((H,), before))
    found = D2O().merge(one)
    assert found.state_H is not None
    for h in range(H):
        k, stay, go = plain(one.k_HND, h), one.stay_HM[h].tolist(), one.go_HE[h].tolist()
        tau = oracle.d2o_threshold(k, stay, go, before)
        assert float(found.state_H[h]) == pytest.approx(tau, abs=1e-6)
        compare(found, one, h, oracle.d2o(k, plain(one.v_HND, h), stay, go, tau - 1e-6))


def test_d2o_with_a_fixed_threshold_keeps_nothing() -> None:
    one = parting(9, 4)
    found = D2O(threshold=0.4).merge(one)
    assert found.state_H is None and not D2O(threshold=0.4).keeps_number
    for h in range(H):
        stay, go = one.stay_HM[h].tolist(), one.go_HE[h].tolist()
        compare(found, one, h, oracle.d2o(plain(one.k_HND, h), plain(one.v_HND, h), stay, go, 0.4))


@sizes
@pytest.mark.parametrize("threshold", [0.2, 0.75, -1.0])
@pytest.mark.parametrize("sigma", ["set", 2.0])
def test_kvmerger(m: int, seed: int, threshold: float, sigma: str | float) -> None:
    one = parting(m, seed, alike=1.0)
    found = KVMerger(threshold=threshold, sigma=sigma).merge(one)
    width = sigma if isinstance(sigma, float) else None
    for h in range(H):
        stay, go = one.stay_HM[h].tolist(), one.go_HE[h].tolist()
        compare(found, one, h, oracle.kvmerger(plain(one.k_HND, h), plain(one.v_HND, h), stay, go, threshold, width))


def test_equal_keys_of_a_merging_set_weigh_equally() -> None:
    k = torch.ones(1, 4, 2)
    v = torch.tensor([[[0.0, 1], [3, 1], [6, 1], [9, 1]]])
    one = Parting(k, v, torch.tensor([[1]]), torch.tensor([[0, 2, 3]]), torch.zeros(1, 3))
    found = KVMerger().merge(one)
    assert found.v_HMD is not None and found.v_HMD.tolist() == [[[4 * 4.5, 4]]]  # for four tokens


def test_kvmerger_by_hand() -> None:
    """Distances 1 and 3 from the kept key: weights exp(-(d / 2)^2); the value stands for three tokens."""
    k = torch.tensor([[[4.0, 0], [5, 0], [8, 0]]])
    v = torch.tensor([[[10.0], [20], [30]]])
    one = Parting(k, v, torch.tensor([[1]]), torch.tensor([[0, 2]]), torch.zeros(1, 2))
    found = KVMerger().merge(one)
    near, far = math.exp(-0.25), math.exp(-2.25)
    total = 1 + near + far
    assert found.k_HMD is not None and found.v_HMD is not None
    assert found.k_HMD[0, 0].tolist() == pytest.approx([(5 + 4 * near + 8 * far) / total, 0])
    assert float(found.v_HMD) == pytest.approx(3 * (20 + 10 * near + 30 * far) / total)


@sizes
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_cam(m: int, seed: int, tokens: int) -> None:
    one = parting(m, seed)
    assert one.sums_HN is not None
    found = CaM(tokens=tokens).merge(one)
    for h in range(H):
        stay, go = one.stay_HM[h].tolist(), one.go_HE[h].tolist()
        attention = one.sums_HN[h].double().tolist()
        values, n = oracle.cam(plain(one.v_HND, h), attention, stay, go, one.chance_HE[h].tolist(), tokens)
        compare(found, one, h, (None, values, n))


def test_cam_by_hand() -> None:
    """Token 1 has twice its receivers' attention: always merged; token 3 a quarter: merged by a draw of 0.2, not of 0.3."""
    v = torch.tensor([[[1.0], [8], [2], [4], [3]]])
    sums = torch.tensor([[9.0, 2, 1, 0.25, 1]])
    for draw, last in ((0.2, 3 + 4 + 4), (0.3, 3 + 4)):
        one = Parting(v, v, torch.tensor([[0, 2, 4]]), torch.tensor([[1, 3]]), torch.tensor([[0.99, draw]]), sums)
        found = CaM(tokens=2).merge(one)
        assert found.v_HMD is not None and found.v_HMD.flatten().tolist() == [1, 2 + 4, last]
        assert found.took_HM.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("lookm", "threshold=2", "a cosine from -1 to 1, or 'never'"),
        ("lookm", "threshold=always", "a cosine from -1 to 1, or 'never'"),
        ("d2o", "threshold=always", "'moving' (D2O's own)"),
        ("d2o", "beta=0", "merge.beta=0"),
        ("kvmerger", "threshold=1.5", "merge.threshold=1.5"),
        ("kvmerger", "sigma=0", "a positive distance, or 'set'"),
        ("kvmerger", "sigma=wide", "a positive distance, or 'set'"),
        ("cam", "tokens=0", "merge.tokens=0"),
        ("cam", "threshold=1.5", "a probability, or 'never'"),
    ],
)
def test_settings_that_cannot_be(name: str, change: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        build(conf_tree.config("merge", name, change), "merge")
    assert says in str(caught.value)


@pytest.mark.parametrize("name", conf_tree.members("merge"))
def test_stacks_in_which_nothing_can_be_merged_are_refused(name: str) -> None:
    merge, keep = conf_tree.member("merge", name), conf_tree.keep("h2o", 30)
    with pytest.raises(UserError, match=r"compress\.merge=\w+ needs a compress\.keep"):
        Stack(merge=merge)
    int8 = conf_tree.member("codec", "int8")
    Stack(keep=keep, merge=merge, keys=int8, values=int8)  # merged once, then encoded
    for phase in ("chunked", "always"):
        with pytest.raises(UserError, match="legal are phase=prefill"):
            Stack(keep=keep, merge=merge, phase=phase, values=int8)
        if "keys" in merge.changes:
            with pytest.raises(UserError, match="legal are phase=prefill"):
                Stack(keep=keep, merge=merge, phase=phase, keys=int8)
            with pytest.raises(UserError, match="legal are positions=original"):
                Stack(keep=conf_tree.keep("streaming", 30), merge=merge, phase=phase, positions="cache")
        else:
            Stack(keep=keep, merge=merge, phase=phase, keys=int8)
