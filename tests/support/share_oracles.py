"""What sharing does to the exact rows of all layers, written slowly from its definitions; it knows no store and no class of ours.

`Rows` are keys or values [H, L, D] of every layer, of tokens that are stored together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Rows = list[Tensor]
Rule = Callable[[Rows, int], Rows]  # (rows of new tokens, tokens stored before) -> what layers read of them


def pooled(groups: int) -> Rule:
    """Every head reads the mean of its group."""

    def rule(rows: Rows, before: int) -> Rows:
        out = []
        for x in rows:
            each = len(x) // groups
            out.append(
                torch.stack([torch.stack([x[h // each * each + k] for k in range(each)]).mean(0) for h in range(len(x))])
            )
        return out

    return rule


def read_from(owners: Mapping[int, int]) -> Rule:
    """Readers read the rows of their owner."""
    return lambda rows, before: [rows[owners.get(i, i)] for i in range(len(rows))]


def minicache(pairs: list[tuple[int, int]], t: float, retain: float) -> Rule:
    """MiniCache's formulas, vector by vector; of tokens stored at once those with the largest angles stay whole."""

    def rule(rows: Rows, before: int) -> Rows:
        out = list(rows)
        for low, high in pairs:
            heads, new, _ = rows[low].shape
            lower, upper = rows[low].clone(), rows[high].clone()
            count = math.ceil(round(retain * (before + new), 9)) - math.ceil(round(retain * before, 9))
            for h in range(heads):
                angles = []
                for n in range(new):
                    a, b = rows[low][h, n].double(), rows[high][h, n].double()
                    u, v = a / a.norm(), b / b.norm()
                    w = torch.arccos((u @ v).clamp(-1, 1))
                    e = torch.sin((1 - t) * w) / torch.sin(w) * u + torch.sin(t * w) / torch.sin(w) * v
                    lower[h, n], upper[h, n] = a.norm() * e, b.norm() * e
                    angles.append(float(w))
                for n in sorted(range(new), key=lambda n: -angles[n])[:count]:
                    lower[h, n], upper[h, n] = rows[low][h, n], rows[high][h, n]
            out[low], out[high] = lower, upper
        return out

    return rule


def aligned(x_HND: Tensor, basis_HDD: Tensor, groups: int) -> Tensor:
    """What heads read of one layer whose heads are turned, averaged, and turned back."""
    each = len(x_HND) // groups
    turned = [x @ basis for x, basis in zip(x_HND, basis_HDD, strict=True)]
    means = [sum(turned[g * each : (g + 1) * each]) / each for g in range(groups)]
    return torch.stack([means[h // each] @ basis_HDD[h].T for h in range(len(x_HND))])
