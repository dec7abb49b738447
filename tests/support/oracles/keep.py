"""Slow oracles of which tokens stay, in plain loops; they know no store, no codec and no model.

Shapes: Q query heads, H KV heads, T tokens, L new tokens, D head dim; query head i reads KV head i // (Q // H).
A kept set is one sorted list of original positions per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

Kept = list[list[int]]
Scores = list[list[float]]


class Step(NamedTuple):
    """State after one forward and its eviction: kept positions per KV head, and each kept token's score (empty: none)."""

    kept: Kept
    scores: Scores


# --- attention ---------------------------------------------------------------------------------------------------


def row_weights(q_D: Tensor, keys: Sequence[Tensor], q_pos: int, k_pos: Sequence[int], window: int | None) -> list[float]:
    """Softmax weights of one query over the given tokens (keys of D, their positions); invisible tokens weigh 0.

    A token is visible when it is not later than the query and, with a sliding window, less than `window` tokens back.
    Everything is computed in float64 and the weight rounded once to float32.
    """
    scale = 1.0 / math.sqrt(q_D.shape[0])
    seen = [n for n, p in enumerate(k_pos) if p <= q_pos and (window is None or q_pos - p < window)]
    out = [0.0] * len(k_pos)
    if not seen:
        return out
    key_ND = torch.stack([keys[n] for n in seen]).double()
    logits = key_ND @ q_D.double() * scale
    weights = torch.softmax(logits, 0).float().tolist()
    for n, weight in zip(seen, weights, strict=True):
        out[n] = weight
    return out


def attention_weights(q_QTD: Tensor, k_HTD: Tensor, window: int | None = None) -> Tensor:
    """Exact causal weights w_QTT (float32): w[i, t, s] is what query t of query head i gives to token s."""
    heads, tokens, _ = q_QTD.shape
    group = heads // k_HTD.shape[0]
    w_QTT = torch.zeros(heads, tokens, tokens)
    for i in range(heads):
        keys = list(k_HTD[i // group])
        for t in range(tokens):
            w_QTT[i, t] = torch.tensor(row_weights(q_QTD[i, t], keys, t, range(tokens), window))
    return w_QTT


# --- the keep rule -----------------------------------------------------------------------------------------------


def tokens_of_fraction(value: float | str, tokens: int) -> int:
    """Budget of a fraction: the decimal as written, times the tokens, rounded up, without floating point."""
    return math.ceil(Fraction(str(value)) * tokens)


def default_recent(budget: int, sinks: int) -> int:
    """Half the budget after the sinks, rounded down."""
    return (budget - sinks) // 2


def top(scores: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The `count` candidates with the highest scores; of equal scores the earlier position wins."""
    return sorted(candidates, key=lambda n: (-scores[n], n))[:count]


def keep_rows(scores: Sequence[float], tokens: int, budget: int, sinks: int, recent: int) -> list[int]:
    """First `sinks` + last `recent` + the best of the middle, `budget` in all, sorted; everything if it fits.

    Raises:
        ValueError: the budget is below sinks + recent.
    """
    if tokens <= budget:
        return list(range(tokens))
    if budget < sinks + recent:
        raise ValueError(f"budget={budget} is below sinks={sinks} + recent={recent}")
    first = list(range(sinks))
    last = list(range(tokens - recent, tokens))
    middle = list(range(sinks, tokens - recent))
    return sorted(first + top(scores, middle, budget - sinks - recent) + last)


def margin(scores: Sequence[float], tokens: int, budget: int, sinks: int, recent: int) -> float:
    """Gap between the worst heavy token kept and the best one dropped; inf when nothing was chosen, 0 at a tie."""
    kept = set(keep_rows(scores, tokens, budget, sinks, recent))
    middle = range(sinks, max(sinks, tokens - recent))
    inside = [scores[n] for n in middle if n in kept]
    outside = [scores[n] for n in middle if n not in kept]
    return min(inside) - max(outside) if inside and outside else math.inf


# --- scores over a whole prompt ----------------------------------------------------------------------------------


def received(q_QTD: Tensor, k_HTD: Tensor, queries: Sequence[int], window: int | None = None) -> Scores:
    """Per KV head: what each token gets from the given queries, summed over them, mean over the group's query heads."""
    kv_heads, tokens = k_HTD.shape[:2]
    group = q_QTD.shape[0] // kv_heads
    out = [[0.0] * tokens for _ in range(kv_heads)]
    for h in range(kv_heads):
        keys = list(k_HTD[h])
        for i in range(h * group, (h + 1) * group):
            for t in queries:
                for s, weight in enumerate(row_weights(q_QTD[i, t], keys, t, range(tokens), window)):
                    out[h][s] += weight / group
    return out


def h2o_scores(q_QTD: Tensor, k_HTD: Tensor, window: int | None = None) -> Scores:
    """Per KV head: attention received from every query, summed over queries, mean over the group's query heads."""
    return received(q_QTD, k_HTD, range(q_QTD.shape[1]), window)


def max_pool(row: Sequence[float], kernel: int) -> list[float]:
    """Maximum over the kernel centred on each entry; entries outside the list do not exist. Same length."""
    half = kernel // 2
    return [max(row[max(0, n - half) : n + half + 1]) for n in range(len(row))]


def snapkv_scores(q_QTD: Tensor, k_HTD: Tensor, window: int = 32, kernel: int = 7, sliding: int | None = None) -> Scores:
    """Per KV head, keys [0, T - window) only: sum over the last `window` queries, mean over the group, then max-pool."""
    tokens = k_HTD.shape[1]
    sums = received(q_QTD, k_HTD, range(tokens - window, tokens), sliding)
    return [max_pool(row[: tokens - window], kernel) for row in sums]


def tova_scores(q_QTD: Tensor, k_HTD: Tensor, window: int | None = None) -> list[float]:
    """Weights of the last query, mean over all query heads: one list for the whole layer."""
    kv_heads, tokens = k_HTD.shape[:2]
    return last_query_mean(q_QTD[:, -1], [list(k_HTD[h]) for h in range(kv_heads)], tokens - 1, range(tokens), window)


def last_query_mean(
    q_QD: Tensor, keys: Sequence[Sequence[Tensor]], q_pos: int, k_pos: Sequence[int], window: int | None
) -> list[float]:
    """Mean over all query heads of one query's weights; keys: per KV head, the tokens at the shared positions k_pos."""
    heads = q_QD.shape[0]
    group = heads // len(keys)
    rows = [row_weights(q_QD[i], keys[i // group], q_pos, k_pos, window) for i in range(heads)]
    return [sum(row[n] for row in rows) / heads for n in range(len(k_pos))]


def knorm_scores(k_HTD: Tensor) -> Scores:
    """Per KV head: minus the Euclidean norm of each key, so that small keys are heavy."""
    return [[-math.sqrt(sum(x * x for x in key)) for key in head] for head in k_HTD.double().tolist()]


# --- kept sets after a whole prompt ------------------------------------------------------------------------------


def keep_streaming(tokens: int, budget: int, sinks: int, heads: int = 1) -> Kept:
    """StreamingLLM: the first `sinks` and the last budget - sinks tokens; sinks=0 is the plain window."""
    return [keep_rows([0.0] * tokens, tokens, budget, sinks, budget - sinks) for _ in range(heads)]


def keep_h2o(q_QTD: Tensor, k_HTD: Tensor, budget: int, sinks: int = 0, recent: int | None = None) -> Kept:
    """H2O: sinks, recent (None: half the budget after sinks) and the most attended of the rest."""
    recent = default_recent(budget, sinks) if recent is None else recent
    return [keep_rows(row, len(row), budget, sinks, recent) for row in h2o_scores(q_QTD, k_HTD)]


def keep_snapkv(q_QTD: Tensor, k_HTD: Tensor, budget: int, window: int = 32, kernel: int = 7) -> Kept:
    """SnapKV: the last `window` tokens and the budget - window best pooled ones before it."""
    kv_heads, tokens = k_HTD.shape[:2]
    if tokens <= budget:
        return [list(range(tokens)) for _ in range(kv_heads)]
    return [keep_rows(row, tokens, budget, 0, window) for row in snapkv_scores(q_QTD, k_HTD, window, kernel)]


def keep_tova(q_QTD: Tensor, k_HTD: Tensor, budget: int) -> Kept:
    """TOVA: the tokens that the last query weighs most, the same ones in every KV head; nothing is protected."""
    kv_heads, tokens = k_HTD.shape[:2]
    kept = keep_rows(tova_scores(q_QTD, k_HTD), tokens, budget, 0, 0)
    return [list(kept) for _ in range(kv_heads)]


def keep_knorm(k_HTD: Tensor, budget: int, sinks: int = 0, recent: int | None = None) -> Kept:
    """Key norm: sinks, recent (None: half the budget after sinks) and the smallest keys of the rest."""
    recent = default_recent(budget, sinks) if recent is None else recent
    return [keep_rows(row, len(row), budget, sinks, recent) for row in knorm_scores(k_HTD)]


def check_protected(kept: Kept, tokens: int, budget: int, sinks: int, recent: int) -> None:
    """Assert what any scorer must leave: count, order, no repeats, sinks and recent present (for random scores)."""
    for row in kept:
        assert len(row) == min(tokens, budget)
        assert row == sorted(set(row))
        assert row[0] >= 0
        assert row[-1] < tokens
        protected = [*range(min(sinks, tokens)), *range(max(0, tokens - recent), tokens)]
        assert set(protected) <= set(row)
