"""Rounding of scales and minima in a given direction.

A scale rounded down, or a minimum rounded up, would push the extreme value of a group outside the code range.
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest value of `dtype` that is >= x (x in a wider or the same dtype)."""
    y = x.to(dtype)
    return torch.where(y.to(x.dtype) < x, torch.nextafter(y, torch.full_like(y, float("inf"))), y)


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest value of `dtype` that is <= x (x in a wider or the same dtype)."""
    y = x.to(dtype)
    return torch.where(y.to(x.dtype) > x, torch.nextafter(y, torch.full_like(y, float("-inf"))), y)


def divide_up(x: Tensor, by: float) -> Tensor:
    """The smallest fp32 value that is >= x / by, exactly, in fp32 alone: not every device has float64.

    x: fp32, 0 or more. by: a number of at most 12 significant bits.
    """
    y = x / by
    high = (y.view(torch.int32) & -4096).view(torch.float32)  # its first 12 bits: both products below are exact
    short = (high * by - x) + (y - high) * by < 0
    return torch.where(short, torch.nextafter(y, torch.full_like(y, float("inf"))), y)


def clamp_to_range(x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Clamp decoded values in place to the range of float16, if `dtype` (or that of x) is float16.

    With a scale rounded up, the largest code may decode to just above the largest float16.
    """
    if (dtype or x.dtype) == torch.float16:
        x.clamp_(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)


def in_range(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
    """(y, fp32, in a cache dtype; how many of its elements were clamped to the range of float16, in place)."""
    if dtype != torch.float16:
        return y.to(dtype), 0
    clipped = (y.abs() > torch.finfo(dtype).max).sum()
    clamp_to_range(y, dtype)
    return y.to(dtype), clipped
