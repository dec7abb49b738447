"""Slow oracles of block formats of small floats, in exact rational arithmetic, from their specifications.

MX: OCP Microscaling specification 1.0. NVFP4: arXiv 2509.25149. A group is a list of numbers that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from tests.support.oracles.codec import float8

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # by code


class Group(NamedTuple):
    """A stored group: its scale, what its elements decode to, how many were clamped, which were a tie but for fp32's rounding."""

    scale: Fraction
    values: list[Fraction]
    clipped: int
    near_ties: list[bool]


def e2m1(value: Fraction) -> tuple[Fraction, bool]:
    """(the nearest number, of two the one with an even code; whether an unbounded format would have rounded further out)."""
    code = min(range(8), key=lambda c: (abs(abs(value) - E2M1[c]), c % 2))
    return (E2M1[code] if value > 0 else -E2M1[code]), abs(value) > 7


def e4m3(value: Fraction) -> tuple[Fraction, bool]:
    """The same for 8 bits."""
    return float8(value, "e4m3")[0], abs(value) > 464


def near_tie(value: Fraction) -> bool:
    """Whether the number lies between two of e2m1 so closely to their middle that fp32 division may give the middle itself."""
    middles = [(low + high) / 2 for low, high in pairwise(E2M1)]
    return any(abs(abs(value) - middle) <= middle * Fraction(1, 2**23) for middle in middles)


def log2_floor(value: Fraction) -> int:
    """The largest k with 2^k <= value, by trying."""
    k = 0
    while Fraction(2) ** k > value:
        k -= 1
    while Fraction(2) ** (k + 1) <= value:
        k += 1
    return k


def mx(group: Sequence[float], bits: int) -> Group:
    """A shared power of two, rounded down, then every element to nearest."""
    x = [Fraction(value) for value in group]
    largest, (element, most) = max(map(abs, x)), ((e2m1, 2), (e4m3, 8))[bits == 8]
    k = max(log2_floor(largest) - most, -127) if largest else -127
    found = [element(value / Fraction(2) ** k) for value in x]
    return Group(Fraction(2) ** k, [f * Fraction(2) ** k for f, _ in found], sum(over for _, over in found), [False] * len(x))


def nv(group: Sequence[float], constant: float) -> Group:
    """An e4m3 scale that brings the largest element to 6, in units of the constant; elements use the rounded one."""
    x, g = [Fraction(value) for value in group], Fraction(constant)
    scale, _ = e4m3(max(map(abs, x)) / 6 / g)
    if not scale:
        return Group(scale, [Fraction(0)] * len(x), 0, [False] * len(x))
    ratios = [value / (scale * g) for value in x]
    found = [e2m1(ratio) for ratio in ratios]
    return Group(scale, [f * scale * g for f, _ in found], sum(over for _, over in found), [near_tie(r) for r in ratios])
