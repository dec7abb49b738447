"""Rounding of exact shares to whole numbers with the same sum (largest remainders)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor


def apportion(shares: Sequence[Fraction], total: int) -> list[int]:
    """Round shares that add up to `total` so that they still do: the largest remainders are rounded up, ties in order."""
    assert sum(shares) == total, "shares must add up to the total"
    whole = [floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (whole[i] - shares[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole
