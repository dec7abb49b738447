"""The make-believe accelerator itself: what a real one would refuse is refused, what makes a host wait is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.make_believe.accelerator import Accelerator
from tests.support.make_believe.tensors import FIRST, SECOND

Act = Callable[[Tensor], object]

REFUSED: dict[str, Act] = {
    "a host tensor added": lambda x: x + torch.ones(3, 4),
    "added to a host tensor": lambda x: torch.ones(3, 4).add_(x),
    "another device": lambda x: x + torch.ones(3, 4, device=SECOND),
    "joined with a host tensor": lambda x: torch.cat((x, torch.ones(1, 4))),
    "joined with a host number": lambda x: torch.stack((x[0, 0], torch.tensor(1.0))),
    "a product with a host tensor": lambda x: x @ torch.ones(4, 2),
    "selected by a host index": lambda x: x.index_select(0, torch.tensor([0])),
    "a host tensor indexed by the device": lambda x: torch.ones(3)[torch.arange(2, device=x.device)],
    "indexed from another device": lambda x: x[torch.arange(2, device=SECOND)],
    "hidden by a host mask": lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool), 0.0),
    "attention to host keys": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], torch.ones(1, 3, 4)),
    "numpy": lambda x: x.numpy(),
}
COUNTED: dict[str, tuple[Act, int, int, bool]] = {  # reads, uploads, whether a kernel runs
    "kernels only": (lambda x: (x * 2 + torch.tensor(1.0)).softmax(-1).sum(), 0, 0, True),
    "views only": (lambda x: x[1:, :2].mT.unsqueeze(0), 0, 0, False),
    "nothing to do": (lambda x: torch.empty(4, 5, device=x.device)[:0] * 2, 0, 0, False),
    "a number read": (lambda x: float(x.sum()), 1, 0, True),
    "a truth read": (lambda x: bool((x > 0).all()), 1, 0, True),
    "a list read": (lambda x: x.tolist(), 1, 0, False),
    "equal": (lambda x: torch.equal(x, x + 1), 1, 0, True),
    "a shape that depends on data": (lambda x: x[x > 0], 1, 0, True),
    "host data": (lambda x: torch.tensor([1, 2], device=x.device), 0, 1, False),
    "a host tensor": (lambda x: torch.zeros(2).to(x.device), 0, 1, False),
    "a host index": (lambda x: x[:, [0, 2]], 0, 1, True),
    "there and back": (lambda x: x.cpu().to(x.device), 1, 1, False),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_device_refuses_is_refused(name: str, inference: bool) -> None:
    with Accelerator().on(), torch.inference_mode(inference), pytest.raises((RuntimeError, TypeError)):
        REFUSED[name](torch.ones(3, 4, device=FIRST))


@pytest.mark.parametrize("name", COUNTED)
def test_what_makes_the_host_wait_is_counted(name: str) -> None:
    act, reads, uploads, works = COUNTED[name]
    at = Accelerator()
    with at.on(), torch.inference_mode():
        x = torch.ones(3, 4, device=FIRST)
        before = at.costs.copy()
        act(x)
    spent = at.costs - before
    assert (spent.reads.total(), spent.uploads.total(), spent.synchronisations) == (reads, uploads, reads + uploads)
    assert (spent.kernels > 0) == works


def test_writing_in_place_and_through_views_reaches_the_tensor() -> None:
    with Accelerator().on():
        x = torch.ones(3, 4, device=FIRST)
        assert x.add_(1) is x
        x[0].zero_()
        x[1:, 0] = 7.0
        torch.index_select(torch.ones(3, 4, device=FIRST), 0, torch.arange(1, device=FIRST), out=x[2:])
        assert x.tolist() == [[0.0] * 4, [7.0, 2.0, 2.0, 2.0], [1.0] * 4]
        assert x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_device_without_float64_refuses_it_and_the_host_has_it() -> None:
    with Accelerator(lacks=[torch.float64]).on():
        x = torch.ones(3, device=FIRST)
        for act in (x.double, lambda: torch.zeros(3, dtype=torch.float64, device=FIRST)):
            with pytest.raises(TypeError, match=r"no torch\.float64"):
                act()
        assert x.cpu().double().dtype == torch.float64
