"""Random numbers that are a hash of what they are for: the same on every device, in any order, however often they are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 24  # of a hash


def mix(state: Tensor, *more: Tensor | int) -> Tensor:
    """24-bit hash of integers, the same on every device: wrapping int64 products and shifts (splitmix64 style)."""
    for value in more:
        state = (state + 1) * -7046029254386353131 ^ (torch.as_tensor(value) + 1) * -4658895280553007687
        state = (state ^ ((state >> 29) & ((1 << 35) - 1))) * -7723592293110705685
        state = (state >> 20) & ((1 << 24) - 1)
    return state
