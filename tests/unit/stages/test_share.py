"""Which layers and heads share a store, SLERP and Procrustes against slow ones, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from harness.errors import UserError
from harness.stages.share.adjacent_layers import AdjacentLayers
from harness.stages.share.aligned_heads import aligned
from harness.stages.share.minicache import MiniCache, merged, most_apart, whole_tokens
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.share.sharing import Measured
from harness.stages.share.similar_layers import SimilarLayers
from harness.stages.share.upper_layers import UpperLayers
from harness.stages.stack import Stack
from tests.support import conf_tree, share_oracles


def test_owners_are_earlier_layers() -> None:
    layers = (0, 1, 2, 4, 5, 7, 8)
    assert AdjacentLayers().owners(layers) == {1: 0, 4: 2, 7: 5}
    assert AdjacentLayers(factor=3).owners(layers) == {1: 0, 2: 0, 5: 4, 7: 4}
    assert UpperLayers().owners(layers) == {5: 4, 7: 4, 8: 4}
    assert UpperLayers(start=0.7).owners(layers) == {7: 5, 8: 5} | {}
    assert MiniCache().pairs(layers) == ((4, 5), (7, 8))
    assert MiniCache(start=0).pairs(layers) == ((0, 1), (2, 4), (5, 7))
    assert AdjacentLayers().owners((3,)) == UpperLayers().owners((3,)) == {}


def test_the_most_similar_layers_are_paired_each_once() -> None:
    near = torch.zeros(4, 4)
    near[0, 2], near[2, 3], near[1, 3], near[0, 1] = 0.9, 0.8, 0.7, 0.99
    measured = Measured({f"similarity.{i}": torch.maximum(near, near.T)[i] for i in range(4)}, {})
    found: Any = conf_tree.member("share", "similar_layers", "readers=0.5")
    assert isinstance(found, SimilarLayers)
    assert found.fitted(measured).owners((0, 1, 2, 3)) == {1: 0, 3: 2}
    assert conf_tree.member("share", "similar_layers").fitted(measured).owners((0, 1, 2, 3)) == {1: 0}
    assert len(found.owners((0, 1, 2, 3))) == 2, "how many read is known before they are measured"


def test_stored_heads_are_a_divisor() -> None:
    assert [PooledHeads().heads(n) for n in (1, 2, 3, 8, 9, 32)] == [1, 1, 1, 4, 3, 16]
    assert PooledHeads(groups=4).heads(8) == 4
    with pytest.raises(UserError, match=r"share\.groups=2 is not possible for 9 KV heads: allowed are 1, 3, 9, or null"):
        PooledHeads(groups=2).heads(9)


@pytest.mark.parametrize("t", [0.0, 0.6, 1.0])
def test_directions_are_those_of_the_paper(t: float) -> None:
    g = torch.Generator().manual_seed(0)
    lower, upper = torch.randn(2, 30, 8, generator=g), 3 * torch.randn(2, 30, 8, generator=g)
    directions, norms, cosines = merged(lower, upper, t)
    low, high = share_oracles.minicache([(0, 1)], t, 0.0)([lower, upper], 0)
    assert torch.allclose(directions * norms[:2, :, None], low, atol=1e-5)
    assert torch.allclose(directions * norms[2:, :, None], high, atol=1e-5)
    assert torch.allclose(directions.norm(dim=-1), torch.ones(2, 30), atol=1e-5)
    assert torch.allclose(cosines, torch.cosine_similarity(lower, upper, dim=-1), atol=1e-6)


def test_the_larger_t_the_nearer_the_direction_is_to_the_upper_layer() -> None:
    lower, upper = torch.tensor([[[2.0, 0]]]), torch.tensor([[[0.0, 5]]])
    assert torch.allclose(merged(lower, upper, 0.0)[0], torch.tensor([1.0, 0]), atol=1e-6)
    assert torch.allclose(merged(lower, upper, 1.0)[0], torch.tensor([0.0, 1]), atol=1e-6)
    angle = torch.tensor(0.6 * torch.pi / 2)  # of a right one, measured from the lower layer
    assert torch.allclose(merged(lower, upper, 0.6)[0], torch.stack([angle.cos(), angle.sin()]), atol=1e-6)


def test_parallel_opposite_and_missing_directions_stay_finite() -> None:
    x = torch.tensor([[[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]])
    y = torch.tensor([[[6.0, 8.0], [-3.0, -4.0], [0.0, 0.0], [0.0, 0.0]]])
    directions, norms, _ = merged(x, y, 0.6)
    assert torch.isfinite(directions).all()
    assert torch.allclose(directions[0, 0] * norms[0, 0], x[0, 0])
    assert torch.equal(norms[:, 2:], torch.tensor([[5.0, 0.0], [0.0, 0.0]]))


def test_the_largest_angles_are_kept_whole() -> None:
    cosines = torch.tensor([[0.9, -0.2, 0.5, -0.2, 1.0], [0.0, 0.1, 0.2, 0.3, -1.0]])
    assert most_apart(cosines, 2).tolist() == [[1, 3], [0, 4]]
    assert most_apart(cosines, 0).shape == (2, 0)
    assert [whole_tokens(Fraction("0.05"), n) for n in (0, 1, 20, 21, 100)] == [0, 1, 1, 2, 5]


def test_aligned_heads_meet_where_they_are_turned_copies() -> None:
    """Heads that are rotations of one: their aligned mean loses nothing; every basis is orthogonal."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 16, generator=g)
    turns = [torch.linalg.qr(torch.randn(16, 16, generator=g))[0] for _ in range(3)]
    heads = torch.stack([x @ turn for turn in turns])
    bases = aligned(torch.einsum("and,bne->abde", heads, heads)[None])
    assert torch.allclose(bases @ bases.mT, torch.eye(16).expand(3, -1, -1), atol=1e-5)
    mean = torch.stack([h @ basis for h, basis in zip(heads, bases, strict=True)]).mean(0)
    for head, basis in zip(heads, bases, strict=True):
        assert torch.allclose(mean @ basis.T, head, atol=1e-4)


def test_alignment_lowers_the_loss_of_pooling() -> None:
    g = torch.Generator().manual_seed(1)
    heads = torch.randn(300, 12, generator=g) @ torch.randn(4, 12, 12, generator=g)
    bases = aligned(torch.einsum("pand,pbne->pabde", *[heads.view(2, 2, 300, 12)] * 2))

    def loss(turned: torch.Tensor) -> float:
        pairs = turned.view(2, 2, 300, 12)
        return float((pairs - pairs.mean(1, keepdim=True)).square().sum())

    assert loss(heads @ bases) < 0.8 * loss(heads)


def test_alone_a_head_is_not_turned() -> None:
    assert torch.equal(aligned(torch.rand(3, 1, 1, 5, 5)), torch.eye(5).expand(3, -1, -1))


REFUSED = {
    "two layers have one direction a token": ("minicache", {"keep": "h2o"}),
    "no decoded copy of merged layers": ("minicache", {"read": "cached"}),
    "its constants are calibrated": ("pooled_heads", {"keys": "int8_static"}),
    "compress.values=fp8_e4m3_static is not possible": ("minicache", {"values": "fp8_e4m3_static"}),
    "do not commute with rotations": ("aligned_heads", {"positions": "cache"}),
    "predicted before RoPE": ("aligned_heads", {"keep": "expected_attention"}),
    "budgets that differ by head": ("aligned_heads", {"keep": "adakv"}),
    "its list names the model's heads": ("adjacent_layers", {"keep": "duo"}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_stored_is_refused_with_what_is_legal(said: str) -> None:
    share, fields = REFUSED[said]
    parts = {
        name: conf_tree.keep(value, 64)
        if name == "keep"
        else conf_tree.member("codec", value)
        if name in ("keys", "values")
        else value
        for name, value in fields.items()
    }
    with pytest.raises(UserError, match=f"{said}.*legal"):
        Stack(share=conf_tree.member("share", share), **parts)


def test_pooled_heads_and_shared_layers_go_with_evictions_and_codecs() -> None:
    for share in ("pooled_heads", "adjacent_layers", "upper_layers", "similar_layers"):
        for name in ("h2o", "adakv", "pyramidkv", "expected_attention"):
            Stack(
                share=conf_tree.member("share", share), keep=conf_tree.keep(name, 64), keys=conf_tree.member("codec", "kivi2")
            )


@pytest.mark.parametrize(
    ("share", "change", "said"),
    [
        ("pooled_heads", "groups=0", "a positive number of stored heads"),
        ("adjacent_layers", "factor=1", "above 1"),
        ("upper_layers", "start=1.0", "below 1"),
        ("similar_layers", "readers=0.6", "at most 0.5"),
        ("minicache", "retain=1.5", "from 0 to 1"),
    ],
)
def test_numbers_out_of_range_are_refused(share: str, change: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        conf_tree.member("share", share, change)
