"""What a model is given of sequences that are fed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inputs(ids: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions [B, L] of new tokens; starts: the position of each sequence's first one.

    Shorter ones are padded on the right: causal attention never sees those tokens, and nothing of them is stored.
    """
    width = max(map(len, ids))
    tokens = [[*one, *[0] * (width - len(one))] for one in ids]
    # Padding repeats the last position: a model with learned positions has none beyond its limit.
    places = [[start + min(i, len(one) - 1) for i in range(width)] for start, one in zip(starts, ids, strict=True)]
    ids_BL, positions_BL = torch.tensor([tokens, places], device=device)  # sent in one go
    return ids_BL, positions_BL
