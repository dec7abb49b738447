"""Slow oracles of the codecs with codebooks and of channel pruning, from their papers; they know no store and no model.

Shapes: H KV heads of one layer, N tokens, D channels, W queries of G query heads a KV head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def centroid(d: int, low: float, high: float, steps: int = 20000) -> float:
    """Mean between two cuts of one coordinate of a uniform unit vector in d dimensions, by the midpoint rule."""
    t = low + (torch.arange(steps, dtype=torch.float64) + 0.5) * (high - low) / steps
    f = torch.exp((d - 3) / 2 * torch.log1p(-t.square()))
    return float((f * t).sum() / f.sum())


def nearest_of(value: float, points: list[float]) -> int:
    """Index of the nearest point."""
    return min(range(len(points)), key=lambda i: abs(value - points[i]))


def turboquant_mse(x: list[float], rotation: Tensor, points: list[float]) -> list[float]:
    """Algorithm 1 for one vector: |x| P^T c(P x / |x|); rotation is P^T, fp64."""
    size = math.sqrt(sum(v * v for v in x))
    y = (torch.tensor(x, dtype=torch.float64) @ rotation) / size
    c = torch.tensor([points[nearest_of(float(v), points)] for v in y], dtype=torch.float64)
    return [float(v) for v in size * (c @ rotation.T)]


def turboquant_prod(x: list[float], rotation: Tensor, points: list[float], s: Tensor) -> list[float]:
    """Algorithm 2 for one vector: the same with one bit less, and sqrt(pi / 2) / d |r| S^T sign(S r) in the rotated basis."""
    d = len(x)
    size = math.sqrt(sum(v * v for v in x))
    y = (torch.tensor(x, dtype=torch.float64) @ rotation) / size
    c = torch.tensor([points[nearest_of(float(v), points)] if points else 0.0 for v in y], dtype=torch.float64)
    r = y - c
    signs = torch.tensor([1.0 if float(row @ r) >= 0 else -1.0 for row in s], dtype=torch.float64)
    guess = c + math.sqrt(math.pi / 2) / d * float(r.norm()) * (signs @ s)
    return [float(v) for v in size * (guess @ rotation.T)]


def largest(far: list[float], k: int) -> set[int]:
    """Indices of the k largest."""
    return set(sorted(range(len(far)), key=lambda i: -far[i])[:k])


def kvquant_keys(x_HND: Tensor, low_HD: Tensor, high_HD: Tensor, points: list[float], k: int) -> Tensor:
    """Per channel, static: of each token's vector of all heads the k largest |x - m| / s exact, the rest m + s c."""
    h, n, d = x_HND.shape
    out = torch.empty(h, n, d, dtype=torch.float64)
    middle, half = (low_HD.double() + high_HD.double()) / 2, (high_HD.double() - low_HD.double()) / 2
    for t in range(n):
        u = ((x_HND[:, t].double() - middle) / half).flatten().tolist()
        exact = largest([abs(v) for v in u], k)
        for i, value in enumerate(u):
            head, c = divmod(i, d)
            coded = middle[head, c] + half[head, c] * points[nearest_of(value, points)]
            out[head, t, c] = x_HND[head, t, c].double() if i in exact else coded
    return out


def kvquant_values(x_HND: Tensor, points: list[float], k: int) -> Tensor:
    """Per token, dynamic, metadata not rounded: the k numbers farthest from the mean exact, the rest in the range of the rest."""
    h, n, d = x_HND.shape
    out = torch.empty(h, n, d, dtype=torch.float64)
    for t in range(n):
        x = x_HND[:, t].double().flatten().tolist()
        mean = sum(x) / len(x)
        exact = largest([abs(v - mean) for v in x], k)
        rest = [v for i, v in enumerate(x) if i not in exact]
        middle, half = (min(rest) + max(rest)) / 2, (max(rest) - min(rest)) / 2
        for i, value in enumerate(x):
            coded = middle + half * points[nearest_of((value - middle) / half, points)]
            out[i // d, t, i % d] = value if i in exact else coded
    return out


def think_channels(q_HGWD: Tensor, k_HND: Tensor, kept: int) -> list[list[int]]:
    """Equation of ThinK: the channels whose part of Q K^T, an outer product, has the largest Frobenius norms."""
    found = []
    for q_GWD, k_ND in zip(q_HGWD.double(), k_HND.double(), strict=True):
        norms = [float((q_GWD[:, :, c].flatten()[:, None] * k_ND[None, :, c]).norm()) for c in range(k_ND.shape[1])]
        found.append(sorted(largest(norms, kept)))
    return found
