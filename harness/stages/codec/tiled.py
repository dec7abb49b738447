"""Products whose rows do not depend on how many come together."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16  # rows of a product: a library sums in another order for another number of rows


def tiled_product(x: Tensor, w_CR: Tensor) -> Tensor:
    """X w, [..., C] by [C, R], a product of its own for every TILE rows, the last filled up with zeros.

    Its memory is its own: what is stored of it must not keep the filling alive.
    """
    rows = x.flatten(0, -2)
    missing = -len(rows) % TILE
    filled = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    tiles = filled.view(-1, TILE, w_CR.shape[0])
    out = torch.bmm(tiles, w_CR.expand(len(tiles), -1, -1)).flatten(0, 1)
    out = out if len(out) == len(rows) else out[: len(rows)].clone()
    return out.view(*x.shape[:-1], w_CR.shape[1])
