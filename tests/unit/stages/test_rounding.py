"""A quotient that is rounded up in fp32 alone is what exact arithmetic gives."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from harness.stages.rounding import divide_up, round_up


@pytest.mark.parametrize("by", [127.0, 448.0, 57344.0, 1.0, 3.0])
def test_a_quotient_is_the_smallest_float_that_is_not_below_the_exact_one(by: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.rand(4000, generator=generator) * 100, torch.arange(1, 300.0) * by, torch.tensor([0.0, 3e38, 1e-30])))
    y = divide_up(x, by)
    assert torch.equal(y, round_up(x.double() / by, torch.float32))
    for quotient, number in zip(y[:300].tolist(), x[:300].tolist(), strict=True):
        exact = Fraction(number) / Fraction(by)
        below = torch.nextafter(torch.tensor(quotient), torch.tensor(-1.0)).item()
        assert Fraction(below) < exact <= Fraction(quotient)
