"""MiniCache: pairs of layers store one direction a token, and a magnitude each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.share.sharing import Share

PARALLEL = 1e-6  # sine of an angle below which directions are averaged in a straight line


@dataclass(frozen=True, kw_only=True)
class MiniCache(Share):
    """MiniCache (arXiv 2405.14366): keys and values of layers l - 1 and l, token by token and head by head.

    e = sin((1 - t) W) / sin W * x_(l-1) / |x_(l-1)| + sin(t W) / sin W * x_l / |x_l|, W the angle between the two; read as
    |x_(l-1)| e and |x_l| e. Pairs are neighbours, from `start` of the depth on; a layer left over stays as it is.

    retain: share of the tokens that are kept whole beside it, those with the largest angles of what is stored at once. After n
    tokens they are the next whole number above retain * n in every head, however the calls were divided. So of a context they
    are its largest angles; of an answer's tokens, stored one at a time, the one that makes the number whole.

    Differs from the paper: it retains angles within a share of their range, so that the number of tokens varies.
    """

    t: float = 0.6  # type: ignore[assignment, misc]  # a field where the protocol has a property
    retain: float = 0.05
    start: float = 0.5

    def __post_init__(self) -> None:
        for key, low in (("t", self.t), ("retain", self.retain), ("start", self.start)):
            require(isinstance(low, (int, float)) and 0 <= low <= 1, f"share.{key}", low, "a number from 0 to 1")

    @property
    def merges(self) -> bool:
        return True

    @property
    def unmerged(self) -> Fraction:
        return Fraction(str(self.retain))

    def pairs(self, layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
        upper = layers[int(Fraction(str(self.start)) * len(layers)) :]
        return tuple(zip(upper[0::2], upper[1::2], strict=False))

    def info(self) -> dict[str, object]:
        return {"share": "minicache", "t": self.t, "retain": self.retain, "start": self.start}

    @property
    def words(self) -> str:
        shown = (("t", self.t, 0.6), ("retain", self.retain, 0.05), ("start", self.start, 0.5))
        said = ", ".join(f"{name} {value:g}" for name, value, usual in shown if value != usual)
        return "minicache" + (f" ({said})" if said else "")


def whole_tokens(unmerged: Fraction, n: int) -> int:
    """How many of n tokens are kept whole."""
    return math.ceil(unmerged * n)


def merged(lower_HND: Tensor, upper_HND: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """(directions [H, N, D], magnitudes [2 * H, N] of the lower and the upper layer, cosines [H, N] of their angles), fp32.

    A vector of length 0 has no direction: it stands at a right angle to every other, and is read as 0.
    """
    lower, upper = lower_HND.float(), upper_HND.float()
    low_norm, up_norm = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (lower, upper))
    tiny = torch.finfo(torch.float32).tiny
    low, up = lower / low_norm.clamp(min=tiny), upper / up_norm.clamp(min=tiny)
    cosine = (low * up).sum(-1, keepdim=True).clamp(-1, 1)
    angle = cosine.acos()
    sine, straight = angle.sin(), angle.sin() <= PARALLEL
    safe = torch.where(straight, 1.0, sine)
    of_lower = torch.where(straight, 1 - t, ((1 - t) * angle).sin() / safe)
    of_upper = torch.where(straight, t, (t * angle).sin() / safe)
    return of_upper * up + of_lower * low, torch.cat((low_norm, up_norm))[..., 0], cosine[..., 0]


def most_apart(cosines_HN: Tensor, count: int) -> Tensor:
    """The `count` tokens of each head with the largest angles, int64 [H, count], ascending; of equal ones the earlier."""
    return cosines_HN.argsort(dim=-1, stable=True)[:, :count].sort(-1).values
