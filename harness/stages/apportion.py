"""Exact shares of a total: in proportion to weights, and rounded to whole numbers with the same sum."""

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


def filled(room: Sequence[Fraction], weights: Sequence[Fraction], total: Fraction) -> list[Fraction]:
    """`total` in proportion to the weights, none above its room; equal shares once all weights left are 0."""
    out, open_ = [Fraction(0)] * len(room), list(range(len(room)))
    while open_:
        mass = sum((weights[i] for i in open_), Fraction(0))
        share = {i: total * weights[i] / mass if mass else total / len(open_) for i in open_}
        full = [i for i in open_ if share[i] >= room[i]]
        for i in full or open_:
            out[i] = min(share[i], room[i])
            total -= out[i]
        open_ = [i for i in open_ if i not in full] if full else []
    return out
