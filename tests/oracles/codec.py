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


# --- asymmetric groups -------------------------------------------------------------------------------------------


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
    heads, rows, dim = x_HND.shape
    length = rows if axis == "channel" else dim
    if length % group:
        raise ValueError(f"group={group} does not divide {length}")
    shape = (heads, rows // group, dim) if axis == "channel" else (heads, rows, dim // group)
    scale, minimum = torch.zeros(shape, dtype=meta_dtype), torch.zeros(shape, dtype=meta_dtype)
    codes = torch.zeros(x_HND.shape, dtype=torch.int64)
    decoded, quotient = torch.zeros(x_HND.shape, dtype=torch.float64), torch.zeros(x_HND.shape, dtype=torch.float64)
    for h in range(heads):
        for a in range(shape[1]):
            for b in range(shape[2]):
                if axis == "channel":
                    cells = [(h, a * group + n, b) for n in range(group)]
                else:
                    cells = [(h, a, b * group + n) for n in range(group)]
                values = exact(torch.stack([x_HND[cell] for cell in cells]))
                low, step, coded, ratios = code_group(values, bits, meta_dtype)
                minimum[h, a, b], scale[h, a, b] = low, step
                for cell, code, ratio in zip(cells, coded, ratios, strict=True):
                    codes[cell], quotient[cell] = code, float(ratio)
                    decoded[cell] = float(Fraction(low.item()) + code * Fraction(step.item()))
    return Coded(codes, scale, minimum, decoded, quotient)


def code_group(
    values: Sequence[Fraction], bits: int, meta_dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int], list[Fraction]]:
    """Stored minimum, stored scale, codes and unrounded quotients of one group."""
    largest = 2**bits - 1
    low = finite(round_down(min(values), meta_dtype), "minimum")
    start = Fraction(low.item())
    step = finite(round_up((max(values) - start) / largest, meta_dtype), "scale")
    ratios = [divide(v - start, Fraction(step.item())) for v in values]
    return low, step, [clamp(round(r), 0, largest) for r in ratios], ratios


def encoded_rows(rows: int, residual: int, group: int, axis: str) -> int:
    """Rows stored as codes: those older than the residual; with per-channel groups whole groups of tokens only."""
    old = max(0, rows - residual)
    return old // group * group if axis == "channel" else old


def int_asym_with_tail(
    x_HND: Tensor, bits: int, group: int, axis: str, residual: int, meta_dtype: torch.dtype
) -> tuple[Coded, Tensor]:
    """(codes of the old rows, exact tail rows) of a store that got rows x in order, in any number of calls.

    Groups start at row 0 and at every multiple of the group, so call boundaries do not move them.
    """
    n = encoded_rows(x_HND.shape[1], residual, group, axis)
    return int_asym(x_HND[:, :n], bits, group, axis, meta_dtype), x_HND[:, n:]


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
