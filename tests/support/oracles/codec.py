"""Slow oracles of the codecs, in exact rational arithmetic; they know no store, no policy and no model.

Shapes: H KV heads, N rows, D channels. A row is one token of one head. Decoded values are float64: the exact value of
what is stored, before any rounding to a compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Fraction


class Coded(NamedTuple):
    """Stored codes and metadata, what they decode to, and the quotients before rounding to codes.

    A quotient within one float32 step of a half may round the other way in float32: compare codes elsewhere
    with ==, there within 1.
    """

    codes: Tensor  # int64, shape of x
    scale: Tensor  # meta dtype; int8: [H, N]; channel axis: [H, N / group, D]; token axis: [H, N, D / group]
    minimum: Tensor | None  # like scale; None for symmetric codes
    decoded: Tensor  # float64, shape of x
    quotient: Tensor  # float64, shape of x


# --- directed rounding -------------------------------------------------------------------------------------------


def round_down(x: Number, dtype: torch.dtype) -> Tensor:
    """Largest number of the dtype that is not above x (a 0-d tensor); -inf below the dtype's range."""
    y = torch.tensor(float(x), dtype=torch.float64).to(dtype)
    low, high = torch.tensor(-torch.inf, dtype=dtype), torch.tensor(torch.inf, dtype=dtype)
    while y.item() > x:
        y = torch.nextafter(y, low)
    while torch.nextafter(y, high).item() <= x:
        y = torch.nextafter(y, high)
    return y


def round_up(x: Number, dtype: torch.dtype) -> Tensor:
    """Smallest number of the dtype that is not below x (a 0-d tensor); inf above the dtype's range."""
    return -round_down(-x, dtype) + 0.0  # no negative zero


def finite(y: Tensor, what: str) -> Tensor:
    """The value, if the dtype can hold it.

    Raises:
        OverflowError: it cannot; the caller has to choose a wider metadata dtype.
    """
    if not torch.isfinite(y):
        raise OverflowError(f"{what} does not fit {y.dtype}")
    return y


# --- int8, symmetric, one scale per token and KV head ------------------------------------------------------------


def int8_per_token(x_HND: Tensor, meta_dtype: torch.dtype) -> Coded:
    """scale = max|x| / 127 rounded up to meta_dtype; code = clamp(round half to even(x / scale), -127, 127)."""
    heads, rows, _ = x_HND.shape
    codes = torch.zeros(x_HND.shape, dtype=torch.int64)
    decoded, quotient = torch.zeros(x_HND.shape, dtype=torch.float64), torch.zeros(x_HND.shape, dtype=torch.float64)
    scale = torch.zeros(heads, rows, dtype=meta_dtype)
    for h in range(heads):
        for n in range(rows):
            values = exact(x_HND[h, n])
            step = finite(round_up(max(abs(v) for v in values) / 127, meta_dtype), "scale")
            scale[h, n] = step
            for d, v in enumerate(values):
                ratio = divide(v, Fraction(step.item()))
                code = clamp(round(ratio), -127, 127)
                codes[h, n, d], quotient[h, n, d] = code, float(ratio)
                decoded[h, n, d] = float(code * Fraction(step.item()))
    return Coded(codes, scale, None, decoded, quotient)


# --- integer groups ----------------------------------------------------------------------------------------------

Cell = tuple[int, int, int]


def int_asym(x_HND: Tensor, bits: int, group: int, axis: str, meta_dtype: torch.dtype) -> Coded:
    """Min/max groups: minimum rounded down, scale = (max - stored minimum) / (2^bits - 1) rounded up, codes against both.

    Args:
        x_HND: rows to encode.
        bits: code width; codes are 0 .. 2^bits - 1.
        group: values that share a minimum and a scale.
        axis: "channel": `group` consecutive tokens of one channel; "token": `group` consecutive channels of one token.
        meta_dtype: dtype of minimum and scale.

    Raises:
        ValueError: the group does not divide the axis it runs along.
    """
    return int_groups(x_HND, bits, group, axis, False, meta_dtype)


def int_groups(
    x_HND: Tensor, bits: int, group: int, axis: str, symmetric: bool, meta_dtype: torch.dtype, layers: int = 1
) -> Coded:
    """As int_asym, also for axis "head" and "tensor" (`group` tokens, all channels of a head or of a layer's heads).

    Symmetric: scale = max|x| / (2^(bits - 1) - 1) rounded up, the code of zero is 2^(bits - 1) - 1. One bit: symmetric codes
    0 and 1 are -s and s with s = max|x| / 2; asymmetric ones are the minimum and the minimum + 2 s, s = (max - min) / 2.
    """
    shape, members = _members(x_HND.shape, group, axis, layers)
    scale, minimum = torch.zeros(shape, dtype=meta_dtype), torch.zeros(shape, dtype=meta_dtype)
    x, found = x_HND.double().tolist(), torch.zeros(3, *x_HND.shape, dtype=torch.float64).tolist()
    for places, cells in members:
        values = [Fraction(x[h][n][d]) for h, n, d in cells]
        low, step, stored = group_of(values, bits, symmetric, meta_dtype)
        largest = 2**bits - (2 if symmetric and bits > 1 else 1)
        for place in places:
            minimum[place], scale[place] = float(low), stored
        for (h, n, d), value in zip(cells, values, strict=True):
            ratio = divide(value - low, step)
            code = clamp(round(ratio), 0, largest)
            found[0][h][n][d], found[1][h][n][d], found[2][h][n][d] = code, float(low + code * step), float(ratio)
    codes, decoded, quotient = torch.tensor(found, dtype=torch.float64)
    return Coded(codes.long(), scale, None if symmetric else minimum, decoded, quotient)


def group_of(
    values: Sequence[Fraction], bits: int, symmetric: bool, meta_dtype: torch.dtype
) -> tuple[Fraction, Fraction, Tensor]:
    """(value of code 0, step between codes, stored scale) of one group."""
    if symmetric:
        half = 2 ** (bits - 1) - 1
        stored = finite(round_up(max(abs(v) for v in values) / (half or 2), meta_dtype), "scale")
        s = Fraction(stored.item())
        return (-half * s, s, stored) if half else (-s, 2 * s, stored)
    low = Fraction(finite(round_down(min(values), meta_dtype), "minimum").item())
    parts = 2**bits - 1 if bits > 1 else 2
    stored = finite(round_up((max(values) - low) / parts, meta_dtype), "scale")
    return low, Fraction(stored.item()) * (2 if bits == 1 else 1), stored


def _members(
    size: torch.Size, group: int, axis: str, layers: int
) -> tuple[tuple[int, int, int], list[tuple[list[Cell], list[Cell]]]]:
    """Shape of the metadata, and for every group (where its metadata stands, which values it holds)."""
    heads, rows, dim = size
    length = dim if axis == "token" else rows
    if length % group:
        raise ValueError(f"group={group} does not divide {length}")
    every = range(heads)
    if axis == "token":
        shape = (heads, rows, dim // group)
        return shape, [
            ([(h, n, b)], [(h, n, b * group + i) for i in range(group)])
            for h in every
            for n in range(rows)
            for b in range(shape[2])
        ]
    tokens = [range(a * group, (a + 1) * group) for a in range(rows // group)]
    if axis == "channel":
        found = [([(h, a, d)], [(h, n, d) for n in ns]) for h in every for a, ns in enumerate(tokens) for d in range(dim)]
        return (heads, rows // group, dim), found
    each = heads // layers if axis == "tensor" else 1
    sets = [range(at, at + each) for at in range(0, heads, each)]
    found = [
        ([(h, a, 0) for h in hs], [(h, n, d) for h in hs for n in ns for d in range(dim)])
        for hs in sets
        for a, ns in enumerate(tokens)
    ]
    return (heads, rows // group, 1), found


def encoded_tokens(rows: int, residual: int, group: int, axis: str) -> int:
    """Rows stored as codes: those older than the residual; with per-channel groups whole groups of tokens only."""
    old = max(0, rows - residual)
    return old // group * group if axis == "channel" else old


def int_asym_with_tail(
    x_HND: Tensor, bits: int, group: int, axis: str, residual: int, meta_dtype: torch.dtype
) -> tuple[Coded, Tensor]:
    """(codes of the old rows, exact tail rows) of a store that got rows x in order, in any number of calls.

    Groups start at row 0 and at every multiple of the group, so call boundaries do not move them.
    """
    n = encoded_tokens(x_HND.shape[1], residual, group, axis)
    return int_asym(x_HND[:, :n], bits, group, axis, meta_dtype), x_HND[:, n:]


# --- constant scales ---------------------------------------------------------------------------------------------


def fixed_scale(limit: float, largest: float) -> Fraction:
    """limit / largest in float32, rounded up until largest * scale reaches the limit; the smallest normal number for 0."""
    step = round_up(Fraction(limit) / Fraction(largest), torch.float32)
    return max(Fraction(step.item()), Fraction(torch.finfo(torch.float32).tiny))


def int8_code(value: Fraction, scale: Fraction) -> tuple[int, bool]:
    """(code, whether it was clamped)."""
    ratio = round(value / scale)
    return clamp(ratio, -127, 127), abs(ratio) > 127


FLOATS = {"e4m3": (3, 7, Fraction(448)), "e5m2": (2, 15, Fraction(57344))}  # bits of mantissa, bias, largest value


def float8(value: Fraction, format: str) -> tuple[Fraction, bool]:
    """(nearest value of an 8-bit float, ties to an even mantissa; whether it was clamped)."""
    mantissa, bias, largest = FLOATS[format]
    if abs(value) > largest:
        return (largest if value > 0 else -largest), True
    exponent = 1 - bias
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa)
    return min(max(round(value / step) * step, -largest), largest), False


def hadamard(dim: int) -> list[list[int]]:
    """Sylvester's matrix of +1 and -1: entry (i, j) is -1 to the number of ones that i and j share."""
    return [[(-1) ** bin(i & j).count("1") for j in range(dim)] for i in range(dim)]


# --- packing -----------------------------------------------------------------------------------------------------


def pack4(codes_HND: Tensor) -> Tensor:
    """Codes 0..15 to bytes, uint8 [H, N, ceil(D / 2)]: even channel in the low nibble, odd channel in the high one."""
    heads, rows, dim = codes_HND.shape
    out = torch.zeros(heads, rows, (dim + 1) // 2, dtype=torch.uint8)
    for h in range(heads):
        for n in range(rows):
            line = [int(c) for c in codes_HND[h, n]] + [0]
            for d in range(0, dim, 2):
                out[h, n, d // 2] = line[d] + 16 * line[d + 1]
    return out


def unpack4(packed_HNP: Tensor, dim: int) -> Tensor:
    """Codes of `pack4`, int64 [H, N, dim]."""
    heads, rows, _ = packed_HNP.shape
    out = torch.zeros(heads, rows, dim, dtype=torch.int64)
    for h in range(heads):
        for n in range(rows):
            for d in range(dim):
                byte = int(packed_HNP[h, n, d // 2])
                out[h, n, d] = byte // 16 if d % 2 else byte % 16
    return out


# --- exact arithmetic --------------------------------------------------------------------------------------------


def exact(x: Tensor) -> list[Fraction]:
    """The values of a 1-d float tensor as rationals."""
    return [Fraction(v) for v in x.double().tolist()]


def divide(a: Fraction, b: Fraction) -> Fraction:
    """a / b, and 0 where the step is 0 (a group or row without spread)."""
    return a / b if b else Fraction(0)


def clamp(n: int, low: int, high: int) -> int:
    """n, held between low and high."""
    return max(low, min(high, n))
