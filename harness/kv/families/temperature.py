"""Queries that grow with their position (llama4's layers without rotation): the scale is made from each row's own positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ATTRIBUTE = "kv_temperature"  # of an attention module whose queries attention scales


@dataclass(frozen=True)
class Temperature:
    """Attention temperature tuning (arXiv 2501.19399): a query at position p is scaled by
    1 + scale * log(1 + floor((p + 1) / floor)).
    """

    floor: float
    scale: float

    def of(self, q_BQLD: Tensor, starts: Sequence[int]) -> Tensor:
        """The queries, scaled; starts: position of each row's first token."""
        length, device = q_BQLD.shape[2], q_BQLD.device
        positions_BL = torch.tensor(list(starts), device=device)[:, None] + torch.arange(length, device=device)
        scales_BL = torch.log1p(torch.floor((positions_BL.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (q_BQLD * scales_BL[:, None, :, None]).to(q_BQLD.dtype)


def temperature_of(module: torch.nn.Module) -> Temperature | None:
    """What `adapt` set on a module whose queries attention scales."""
    found = vars(module).get(ATTRIBUTE)  # a module looks long for an attribute that it lacks
    return found if isinstance(found, Temperature) else None
