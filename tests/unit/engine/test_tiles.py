"""Tiles: a row's product has the same bits in any company, in larger tiles only where these give the same, packed or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from harness.engine.tiles import TILE, WIDER, Tiled, prepare, tiles
from harness.models import packed


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def layer(kind: str) -> torch.nn.Module:
    made = Conv1D(48, 33) if kind == "conv" else torch.nn.Linear(33, 48, bias=kind == "bias")
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(noise(*one.shape))
    return made


@pytest.mark.parametrize("kind", ["plain", "bias", "conv"])
@torch.inference_mode()
def test_a_rows_product_is_the_same_bits_in_any_company(kind: str) -> None:
    module, x = layer(kind), noise(700, 33)
    expected = module(x)
    prepare(torch.nn.ModuleList([module]))
    assert torch.equal(module(x), expected)  # outside of `tiles` nothing changes
    with tiles(True):
        alone = torch.cat([module(x[i : i + 1]) for i in range(len(x))])
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
        for n in (2, TILE, TILE + 1, 100, 256, 700):
            assert torch.equal(module(x[-n:]), alone[-n:]), n
        assert torch.equal(module(x.view(7, 100, 33)), alone.view(7, 100, 48))


def test_larger_tiles_are_used_only_where_they_give_the_same_bits() -> None:
    called: list[int] = []

    def product(x: Tensor, exact: int) -> Tensor:
        called.append(len(x))
        return x if len(x) <= exact else x * (1 + 1e-6)

    for exact, largest in ((TILE, TILE), (64, 64), (max(WIDER), max(WIDER))):
        one = Tiled(lambda x, exact=exact: product(x, exact))
        x = noise(max(WIDER) + 3 * TILE - 1, 8)
        with tiles(True):
            assert torch.equal(one.forward(x), x)
            called.clear()
            assert torch.equal(one.forward(x), x)
        assert max(called) == largest and sum(called) == max(WIDER) + 3 * TILE


def test_a_model_that_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [layer("plain"), layer("bias")]
    nbytes = sum(m.weight.numel() * 4 for m in modules)
    monkeypatch.setattr(packed, "MOST", nbytes - 1)
    assert packed.packed(modules, TILE) == [None, None]
    monkeypatch.setattr(packed, "MOST", nbytes)
    assert any(packed.packed(modules, TILE)) == packed._possible(modules[0], modules[0].weight)


def test_what_onednn_does_not_multiply_is_not_copied() -> None:
    class Other(torch.nn.Linear):
        pass

    assert packed.packed([layer("plain").double(), Other(4, 4)], TILE) == [None, None]


def test_a_subclass_keeps_tiles_of_one_size_and_may_return_several_things() -> None:
    called: list[int] = []

    class Router(torch.nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            called.append(len(x))
            return x * 2, x[:, :1]

    module, x = Router(4, 4), noise(100, 4)
    prepare(torch.nn.ModuleList([module]))
    with tiles(True):
        twice, first = module(x)
    assert torch.equal(twice, x * 2) and torch.equal(first, x[:, :1])
    assert called == [TILE] * 7
