"""Slow oracles of further scores and budgets, in plain loops from the papers; they know no store and no model.

Shapes: Q query heads, H KV heads, T tokens, D head dim; query head i reads KV head i // (Q // H). A score is one list of
numbers per KV head; a kept set one sorted list of positions per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from torch import Tensor

from tests.support.oracles.keep import Kept, Scores, h2o_scores, max_pool, received, row_weights

Rotate = Callable[[list[float], int], list[float]]
"""A vector of D numbers turned to a position."""


def group_weights(q_QTD: Tensor, k_HTD: Tensor, head: int, t: int) -> list[float]:
    """What query t gives to tokens 0..t of a KV head: mean over the group's query heads."""
    group = q_QTD.shape[0] // k_HTD.shape[0]
    keys = list(k_HTD[head])
    rows = [row_weights(q_QTD[i, t], keys, t, range(len(keys)), None) for i in range(head * group, (head + 1) * group)]
    return [sum(row[s] for row in rows) / group for s in range(t + 1)]


# --- scores ------------------------------------------------------------------------------------------------------


def scissorhands_scores(q_QTD: Tensor, k_HTD: Tensor, window: int) -> Scores:
    """Minus the number of the last `window` queries t (counted from 1) that give a token they see less than 1/t."""
    tokens = k_HTD.shape[1]
    out = [[0.0] * tokens for _ in k_HTD]
    for head in range(k_HTD.shape[0]):
        for t in range(max(0, tokens - window), tokens):
            for s, weight in enumerate(group_weights(q_QTD, k_HTD, head, t)):
                if weight < 1 / (t + 1):
                    out[head][s] -= 1
    return out


def keydiff_scores(k_HTD: Tensor) -> Scores:
    """Minus the cosine similarity of each key and the mean of all unit keys."""
    out = []
    for head in k_HTD.double().tolist():
        units = [[x / math.hypot(*key) for x in key] for key in head]
        anchor = [sum(unit[d] for unit in units) / len(units) for d in range(len(units[0]))]
        length = math.hypot(*anchor)
        out.append([-sum(a * u for a, u in zip(anchor, unit, strict=True)) / length for unit in units])
    return out


def l1(v_HTD: Tensor) -> Scores:
    """Sum of the absolute values of each row."""
    return [[sum(abs(x) for x in row) for row in head] for head in v_HTD.double().tolist()]


def l2(v_HTD: Tensor) -> Scores:
    """Euclidean norm of each row."""
    return [[math.hypot(*row) for row in head] for head in v_HTD.double().tolist()]


def vatp_scores(q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Scores:
    """Attention received from all queries (mean over the group) times the L1 norm of the value."""
    pairs = zip(h2o_scores(q_QTD, k_HTD), l1(v_HTD), strict=True)
    return [[s * v for s, v in zip(sums, norms, strict=True)] for sums, norms in pairs]


def criticalkv_scores(q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, window: int, kernel: int, epsilon: float) -> Scores:
    """Tokens before the window only: (mean attention of the last `window` queries, max-pooled, + epsilon) * |v|_1."""
    tokens = k_HTD.shape[1]
    window = min(window, tokens)
    out = []
    for sums, norms in zip(received(q_QTD, k_HTD, range(tokens - window, tokens)), l1(v_HTD), strict=True):
        means = [x / window for x in max_pool(sums[: tokens - window], kernel)]
        out.append([(a + epsilon) * norm for a, norm in zip(means, norms, strict=False)])
    return out


def softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


def deviation(row: Sequence[float]) -> float:
    """Standard deviation of a sample."""
    mean = sum(row) / len(row)
    return math.sqrt(sum((x - mean) ** 2 for x in row) / (len(row) - 1))


def lagkv_part(part: list[list[float]], after: list[list[float]]) -> list[float]:
    """Score of each row of a part against the next part: spread over channels of the rows scaled by the next part's range."""
    spreads = []
    for row in part:
        scaled = []
        for d, x in enumerate(row):
            column = [other[d] for other in after]
            width = max(column) - min(column)
            scaled.append((x - min(column)) / (width if width > 0 else 1.0))
        spreads.append(deviation(scaled))
    return softmax(spreads)


def lagkv_means(k_HTD: Tensor, v_HTD: Tensor, lag: int, sinks: int) -> list[list[list[float]]]:
    """Per KV head and part: mean of the key and the value score of each row; the last whole part has none."""
    out = []
    for keys, values in zip(k_HTD.double().tolist(), v_HTD.double().tolist(), strict=True):
        starts = list(range(sinks, len(keys) - lag + 1, lag))
        parts = []
        for at, after in pairwise(starts):
            both = [lagkv_part(x[at : at + lag], x[after : after + lag]) for x in (keys, values)]
            parts.append([(a + b) / 2 for a, b in zip(*both, strict=True)])
        out.append(parts)
    return out


def keep_lagkv(k_HTD: Tensor, v_HTD: Tensor, budget: int, lag: int, sinks: int) -> Kept:
    """Sinks and the last `lag` tokens; then tokens after the last whole part, the newest first; then every part's best, its
    second best and so on, earlier parts first.
    """
    tokens = k_HTD.shape[1]
    kept = []
    for parts in lagkv_means(k_HTD, v_HTD, lag, sinks):
        order = [sorted(range(lag), key=lambda i, part=part: (-part[i], i)) for part in parts]  # type: ignore[misc]
        ranked = [sinks + p * lag + order[p][place] for place in range(lag) for p in range(len(parts))]
        tail = list(range(tokens - lag - 1, sinks + len(parts) * lag - 1, -1))
        kept.append(sorted([*range(sinks), *[*tail, *ranked][: budget - sinks - lag], *range(tokens - lag, tokens)]))
    return kept


def expected_attention_scores(
    raw_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, future: int, epsilon: float, rotate: Rotate | None
) -> Scores:
    """(softmax(s m'k + s^2/2 k'Ck) + epsilon) |v|, m and C the moments of the raw queries under the mean rotation."""
    q_heads, tokens, d = raw_QTD.shape
    group, scale = q_heads // k_HTD.shape[0], d**-0.5
    turn = [[float(i == j) for j in range(d)] for i in range(d)]  # turn[i][j]: channel i of what the j-th unit vector becomes
    if rotate is not None:
        turned = [[rotate(turn[j], tokens + step) for step in range(future)] for j in range(d)]
        turn = [[sum(x[i] for x in turned[j]) / future for j in range(d)] for i in range(d)]
    keys, norms = k_HTD.double().tolist(), l2(v_HTD)
    out = [[0.0] * tokens for _ in keys]
    for i in range(q_heads):
        rows = raw_QTD[i].double().tolist()
        mean = [sum(row[a] for row in rows) / tokens for a in range(d)]
        cov = [[sum((r[a] - mean[a]) * (r[b] - mean[b]) for r in rows) / tokens for b in range(d)] for a in range(d)]
        m = [sum(turn[a][b] * mean[b] for b in range(d)) for a in range(d)]
        half = [[sum(turn[a][c] * cov[c][b] for c in range(d)) for b in range(d)] for a in range(d)]
        c = [[sum(half[a][e] * turn[b][e] for e in range(d)) for b in range(d)] for a in range(d)]
        logits = []
        for key in keys[i // group]:
            linear = sum(x * y for x, y in zip(m, key, strict=True))
            square = sum(key[a] * c[a][b] * key[b] for a in range(d) for b in range(d))
            logits.append(scale * linear + scale**2 / 2 * square)
        for s, weight in enumerate(softmax(logits)):
            out[i // group][s] += weight / group
    return [[(a + epsilon) * n for a, n in zip(row, norm, strict=True)] for row, norm in zip(out, norms, strict=True)]


# --- whole chunks ------------------------------------------------------------------------------------------------


def keep_chunkkv(q_QTD: Tensor, k_HTD: Tensor, budget: int, window: int, chunk: int) -> Kept:
    """The window, then whole chunks by summed attention; the last chunk taken is cut to its first rows."""
    tokens = k_HTD.shape[1]
    if tokens <= budget:
        return [list(range(tokens)) for _ in k_HTD]
    kept = []
    for sums in received(q_QTD, k_HTD, range(tokens - window, tokens)):
        chunks = [list(range(at, min(at + chunk, tokens - window))) for at in range(0, tokens - window, chunk)]
        chunks.sort(key=lambda rows: (-sum(sums[n] for n in rows), rows[0]))
        chosen = [n for rows in chunks for n in rows][: budget - window]
        kept.append(sorted([*chosen, *range(tokens - window, tokens)]))
    return kept


# --- budgets of layers and heads ---------------------------------------------------------------------------------


def pyramid_floor(capacity: int, window: int, tokens: int, layers: int, beta: int = 20) -> list[int]:
    """The authors' integers: B = C - W; min = B // beta; max = 2 B - min; a step of (max - min) // (L - 1)."""
    b = capacity - window
    if tokens < 2 * b:
        return [capacity] * layers
    least = b // beta
    most = 2 * b - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * b - most
    step = (most - least) // (layers - 1)
    return [most - layer * step + window for layer in range(layers)]


def whole(shares: Sequence[Fraction], total: int) -> list[int]:
    """Rounded down, then one more to the largest remainders until the sum is right; the earlier one first."""
    out = [math.floor(share) for share in shares]
    while sum(out) < total:
        best = max(range(len(out)), key=lambda i: (shares[i] - out[i], -i))
        out[best] += 1
    return out


def adakv_counts(scores: Scores, each: int, alpha: str) -> list[int]:
    """Rows of each head: its entries among the best H * each of the layer, pulled to `each` by alpha."""
    ranked = sorted((-score, head, n) for head, row in enumerate(scores) for n, score in enumerate(row))
    won = [0] * len(scores)
    for _, head, _ in ranked[: each * len(scores)]:
        won[head] += 1
    a = Fraction(alpha)
    return whole([(1 - a) * n + a * each for n in won], each * len(scores))


def mean_entropy(q_QTD: Tensor, k_HTD: Tensor, window: int) -> float:
    """Entropy in nats of the last `window` queries' weights (mean over a group), mean over queries and KV heads."""
    tokens, heads = k_HTD.shape[1], range(k_HTD.shape[0])
    rows = [group_weights(q_QTD, k_HTD, head, t) for head in heads for t in range(max(0, tokens - window), tokens)]
    return sum(-sum(w * math.log(w) for w in row if w > 0) for row in rows) / len(rows)


def attention_spread(q_QTD: Tensor, k_HTD: Tensor) -> float:
    """D2O's F of a layer: variances of the tokens' received attention, from 0 to 1 over the KV heads, their mean."""
    tokens, heads = k_HTD.shape[1], range(k_HTD.shape[0])
    variances = []
    for head in heads:
        sums = [0.0] * tokens
        for t in range(tokens):
            for s, weight in enumerate(group_weights(q_QTD, k_HTD, head, t)):
                sums[s] += weight
        mean = sum(sums) / tokens
        variances.append(sum((x - mean) ** 2 for x in sums) / (tokens - 1))
    least, most = min(variances), max(variances)
    return sum((x - least) / (most - least + 1e-6) for x in variances) / len(variances)
