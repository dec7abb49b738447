"""Closed formulas of the bytes of one layer's store; they know no tensor, no policy and no model.

Arguments: heads = KV heads, tokens = stored tokens per KV head, dim = head dim, elem = bytes of an exact value, meta = bytes of a
scale or a minimum. Every formula covers K and V together and returns bytes by kind.
"""

from __future__ import annotations

from collections.abc import Mapping

Sizes = dict[str, int]

POSITION = 4  # int32
SCORE = 4  # fp32


def exact_tokens(heads: int, rows: int, dim: int, elem: int = 2) -> Sizes:
    """Tokens as they are: the full cache, or what eviction left; a full cache stores no positions."""
    return {"payload": 2 * heads * rows * dim * elem}


def int8_per_token(heads: int, rows: int, dim: int, meta: int = 2) -> Sizes:
    """One byte a value and one scale per token and KV head, for K and for V."""
    return {"payload": 2 * heads * rows * dim, "metadata": 2 * heads * rows * meta}


def int4_store(heads: int, rows: int, dim: int, group: int, residual: int, axis: str, elem: int = 2, meta: int = 2) -> Sizes:
    """K or V alone in packed 4-bit groups (a minimum and a scale each) with an exact tail.

    axis "channel": groups of `group` tokens of one channel, whole groups beyond the residual are encoded;
    axis "token": groups of `group` channels of one token, every token beyond the residual is encoded.
    """
    old = max(0, rows - residual)
    encoded = old // group * group if axis == "channel" else old
    groups = encoded // group * dim if axis == "channel" else encoded * (dim // group)
    return {
        "payload": heads * encoded * ((dim + 1) // 2),
        "metadata": heads * groups * 2 * meta,
        "tail": heads * (rows - encoded) * dim * elem,
    }


def int4_groups(
    heads: int,
    rows: int,
    dim: int,
    group: int,
    residual: int = 0,
    key_axis: str = "channel",
    elem: int = 2,
    meta: int = 2,
) -> Sizes:
    """K along `key_axis`, V per token."""
    keys = int4_store(heads, rows, dim, group, residual, key_axis, elem, meta)
    return add(keys, int4_store(heads, rows, dim, group, residual, "token", elem, meta))


def eviction(heads: int, rows: int, scores: bool) -> Sizes:
    """What an evicted store holds besides its tokens: a position per token and KV head, and a kept score where it has one."""
    return {"positions": heads * rows * POSITION, "state": heads * rows * SCORE if scores else 0}


def keeps_h2o_scores(phase: str) -> bool:
    """H2O scores live as long as another eviction may come: in every phase but `prefill`."""
    return phase != "prefill"


def sliding_rows(tokens: int, window: int) -> int:
    """Tokens a sliding-window layer holds."""
    return min(tokens, window)


def add(*parts: Mapping[str, int]) -> Sizes:
    """Sum by kind."""
    out: Sizes = {}
    for part in parts:
        for kind, size in part.items():
            out[kind] = out.get(kind, 0) + size
    return out


def total(*parts: Mapping[str, int]) -> int:
    """Sum over all kinds of all parts."""
    return sum(add(*parts).values())
