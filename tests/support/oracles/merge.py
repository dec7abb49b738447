"""Merging of one head, written from the papers one token at a time in plain numbers; it knows no tensor operation of ours.

Vectors are lists of floats; `stay` and `go` are lists of token numbers. Each returns {token that stays: its new vector}, only of
those that received something, and how many tokens were merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]
Found = dict[int, list[float]]


def cosine(a: Vector, b: Vector) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mixed(parts: Sequence[tuple[float, Vector]]) -> list[float]:
    """Weighted mean."""
    total = sum(w for w, _ in parts)
    return [sum(w * x[i] for w, x in parts) / total for i in range(len(parts[0][1]))]


def nearest(k: Sequence[Vector], e: int, stay: Sequence[int]) -> tuple[float, int]:
    return max((cosine(k[e], k[c]), -c) for c in stay)


def joined(k: Sequence[Vector], stay: Sequence[int], go: Sequence[int], least: float) -> dict[int, list[tuple[int, float]]]:
    """(token, cosine) of those that join each token that stays."""
    found: dict[int, list[tuple[int, float]]] = {}
    for e in go:
        u, c = nearest(k, e, stay)
        if u >= least:
            found.setdefault(-c, []).append((e, u))
    return found


def lookm(
    k: Sequence[Vector], v: Sequence[Vector], stay: Sequence[int], go: Sequence[int], least: float = -1.0
) -> tuple[Found, Found, int]:
    sets = joined(k, stay, go, least)

    def pivoted(x: Sequence[Vector]) -> Found:
        found = {}
        for c, members in sets.items():
            halves = [mixed([(1.0, x[e]), (1.0, x[c])]) for e, _ in members]
            found[c] = mixed([(1.0, x[c]), *((1.0, half) for half in halves)])
        return found

    return pivoted(k), pivoted(v), sum(map(len, sets.values()))


def d2o_threshold(
    k: Sequence[Vector], stay: Sequence[int], go: Sequence[int], before: float | None, beta: float = 0.7
) -> float:
    mean = sum(nearest(k, e, stay)[0] for e in go) / len(go)
    return mean if before is None else beta * mean + (1 - beta) * before


def d2o(
    k: Sequence[Vector], v: Sequence[Vector], stay: Sequence[int], go: Sequence[int], tau: float
) -> tuple[Found, Found, int]:
    sets = joined(k, stay, go, tau)

    def weighted(x: Sequence[Vector]) -> Found:
        return {c: mixed([(math.exp(1.0), x[c]), *((math.exp(u), x[e]) for e, u in found)]) for c, found in sets.items()}

    return weighted(k), weighted(v), sum(map(len, sets.values()))


def kvmerger(
    k: Sequence[Vector],
    v: Sequence[Vector],
    stay: Sequence[int],
    go: Sequence[int],
    threshold: float,
    width: float | None = None,
) -> tuple[Found, Found, int]:
    """width: of the Gaussian kernel; None: that of each set, from its mean distance."""
    runs = [[0]]
    for i in range(1, len(k)):
        if cosine(k[i - 1], k[i]) >= threshold:
            runs[-1].append(i)
        else:
            runs.append([i])
    sets: dict[int, list[int]] = {}
    for run in runs:
        kept = [i for i in run if i in stay]
        for e in (i for i in run if i in go and kept):
            sets.setdefault(min(kept, key=lambda c: (abs(c - e), c)), []).append(e)

    def weights(c: int, members: Sequence[int]) -> list[float]:
        gaps = [distance(k[c], k[e]) for e in members]
        sigma = sum(gaps) / len(gaps) / math.sqrt(2) if width is None else width
        return [math.exp(-(gap**2) / (2 * sigma**2)) if sigma else 1.0 for gap in gaps]

    def merged(x: Sequence[Vector]) -> Found:
        return {
            c: mixed([(1.0, x[c]), *((g, x[e]) for g, e in zip(weights(c, members), members, strict=True))])
            for c, members in sets.items()
        }

    values = {c: [x * (1 + len(sets[c])) for x in one] for c, one in merged(v).items()}
    return merged(k), values, sum(map(len, sets.values()))


def cam(
    v: Sequence[Vector], a: Sequence[float], stay: Sequence[int], go: Sequence[int], draws: Sequence[float], m: int
) -> tuple[Found, int]:
    """draws: for each token that goes, a uniform number; it is merged if that is below its probability."""
    found: Found = {}
    n = 0
    for e, draw in zip(go, draws, strict=True):
        receivers = [c for c in stay if c > e][:m]
        mean = sum(a[c] for c in receivers) / len(receivers) if receivers else 0.0
        if not receivers or draw >= min(1.0, a[e] / mean):
            continue
        n += 1
        for c in receivers:
            old = found.get(c, list(v[c]))
            found[c] = [x + y / len(receivers) for x, y in zip(old, v[e], strict=True)]
    return found, n
