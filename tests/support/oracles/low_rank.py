"""Slow oracles of low rank, from the papers, in fp64; they know no store, no codec and no model.

Shapes: U tokens [N, inputs], W a projection [outputs, inputs], X keys or values [N, outputs].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def palu_whitened(inputs: Tensor, weight: Tensor, rank: int) -> Tensor:
    """Palu: W S = U s V^T with S S^T = inputs^T inputs, cut to `rank`, S undone. The weight that takes W's place."""
    s = torch.linalg.cholesky(inputs.double().T @ inputs.double())
    return truncated(weight.double() @ s, rank) @ torch.linalg.inv(s)


def truncated(x: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def xkv(layers: Sequence[Tensor], rank: int) -> list[Tensor]:
    """xKV: the layers' X side by side, cut to one rank, and taken apart again."""
    return list(truncated(torch.cat([x.double() for x in layers], 1), rank).split([x.shape[1] for x in layers], 1))
