"""Rounding of metadata in a given direction, and what follows from it; it knows nothing of codecs.

A scale rounded down or a minimum rounded up would push the extreme value of a group outside the code range.
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


def keep_finite(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bound decoded values in place to what `dtype` (or their own) holds, and return them.

    With a scale rounded up, the outermost code may lie just past the largest float16.
    """
    if (dtype or x.dtype) == torch.float16:
        x.clamp_(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)
    return x
