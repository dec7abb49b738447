"""What merges share: the kept token with the most similar key, and sums over the tokens that join a kept one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

BLOCK_ELEMENTS = 1 << 24  # cosines held at a time


def most_similar(go_HED: Tensor, stay_HMD: Tensor) -> tuple[Tensor, Tensor]:
    """(largest cosine [H, E], index int64 [H, E] of the kept token it is with; of equal ones the earliest)."""
    stay_HDM = normalize(stay_HMD, dim=-1).mT
    go_HED = normalize(go_HED, dim=-1)
    (h, e, _), m = go_HED.shape, stay_HDM.shape[2]
    cosine_HE, at_HE = go_HED.new_empty(h, e), torch.empty(h, e, dtype=torch.long, device=go_HED.device)
    block = max(1, BLOCK_ELEMENTS // max(1, h * m))
    for start in range(0, e, block):
        some = slice(start, start + block)
        cosine_HBM = go_HED[:, some] @ stay_HDM
        at_HE[:, some] = cosine_HBM.argmax(-1)
        cosine_HE[:, some] = cosine_HBM.gather(-1, at_HE[:, some, None])[..., 0]
    return cosine_HE, at_HE


def summed(x_HED: Tensor, at_HE: Tensor, m: int) -> Tensor:
    """For each of m kept tokens the sum over the tokens x that are assigned to it, [H, m, D]."""
    h, _, d = x_HED.shape
    starts = torch.arange(0, h * m, m, device=at_HE.device)[:, None]
    out = x_HED.new_zeros(h * m, d)
    return out.index_add_(0, (at_HE + starts).flatten(), x_HED.flatten(0, 1)).view(h, m, d)
