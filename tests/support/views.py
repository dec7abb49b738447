"""Whole prompts as a scorer sees them, made of random tensors; no model and no store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.kv.attention_stats import column_sums
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Scorer, Stats
from tests.support.kept import kept_tokens

HEADS = [(4, 4), (4, 2), (4, 1), (9, 3)]
D = 16


def tensors(q_heads: int, kv_heads: int, tokens: int, seed: int = 0, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries [Q, T, D], keys and values [H, T, D]."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, tokens, d, generator=g) for n in (q_heads, kv_heads, kv_heads))  # type: ignore[return-value]


@dataclass(frozen=True)
class HalfRope:
    """Rotary embedding of channel pairs (i, i + D/2), written for the tests."""

    base: float = 100.0

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle_NE = pos_N[:, None].double() * self.base ** -(torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle_NE.cos().to(x.dtype), angle_NE.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        return self.rotate(x, -pos_N)


def view(q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor | None = None, queries: int = 512, **fields: Any) -> LayerView:
    """A whole prompt with every statistic and a rotary embedding; q_QTD stands for queries before and after rotation."""
    h, n, d = k_HTD.shape
    centred = q_QTD - q_QTD.mean(1, keepdim=True)
    moments = q_QTD.mean(1), centred.mT @ centred / n
    stats = Stats(column_sums(q_QTD, k_HTD, d**-0.5), q_QTD[:, -queries:], d**-0.5, *moments)
    pos = torch.arange(n, dtype=torch.int32).expand(h, n)
    v = k_HTD if v_HTD is None else v_HTD
    known = {"layer": 0, "seen": n, "pos_HN": pos, "stats": stats, "read_keys": lambda: k_HTD, "read_values": lambda: v}
    known |= {"rope": HalfRope()}
    return LayerView(**(known | fields))


def rule(scorer: Scorer, **fields: Any) -> Keep:
    """A keep whose budget is given when it chooses."""
    return Keep(scorer=scorer, budget=Amount(unit="fraction", value=1.0), **fields)


def chosen(keep: Keep, views: Sequence[LayerView], tokens: int) -> list[list[list[int]]]:
    """Kept tokens per layer and KV head."""
    found = kept_tokens(keep, views, tokens)
    everything = [[list(range(v.n))] * v.pos_HN.shape[0] for v in views]
    return [
        whole if index is None else [row.tolist() for part in index for row in part]
        for whole, index in zip(everything, found, strict=True)
    ]
