"""How a family applies its rotation, as one function of (q, k, cos, sin) on channels as they are cached."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Angles = Callable[..., Any]
Apply = Callable[..., tuple[Tensor, Tensor]]


class RealAngles(torch.nn.Module):
    """Cosines and sines [B, N, D] of a rotary embedding that gives complex factors [B, N, D / 2], one for each pair."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: only its device and dtype are looked at; position_ids [B, N]."""
        factors = self.rotary(x, position_ids)
        return factors.real.repeat_interleave(2, -1), factors.imag.repeat_interleave(2, -1)


def pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring channels (0, 1), (2, 3), ...; q, k [B, H, N, D], cos and sin [B, N, D]."""

    def turned(x: Tensor) -> Tensor:
        crossed = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(1) + crossed * sin.unsqueeze(1)

    return turned(q), turned(k)


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate channel i with channel i + D / 2; q, k [B, H, N, D], cos and sin [B, N, D]."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def rotation_of(module: ModuleType, rotary: torch.nn.Module | None) -> tuple[torch.nn.Module | None, Apply | None]:
    """(what gives angles, what applies them) in a family's module; None for what it has not.

    Families that take interleaved channels apart before they rotate (`apply_rotary_pos_emb_interleave`) cache them in halves.
    """
    if rotary is None:
        return None, None
    if found := getattr(module, "apply_rotary_pos_emb", None):
        return rotary, found
    if hasattr(module, "apply_rotary_pos_emb_interleave"):
        return rotary, halves
    return (RealAngles(rotary), pairs) if hasattr(module, "apply_rotary_emb") else (rotary, None)
