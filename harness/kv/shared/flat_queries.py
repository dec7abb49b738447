"""Queries of layers that store a rotated part of their keys and a latent, as `shared.folded` describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.kv.forward import Forward
from harness.kv.shared.folded import at_zero
from harness.stages.transfers import places


def beside_flat(run: Forward, layer: int, rows: Sequence[int], q_RQLD: Tensor, k_RHLD: Tensor) -> tuple[Tensor, Tensor]:
    """([query ; query at position 0], [new key ; 0]) of rows that have stored such a layer."""
    rope, (heads, length) = run.ropes[layer], q_RQLD.shape[1:3]
    assert rope is not None, "models without rotary positions are refused"
    positions = [places(run.start(row), length, q_RQLD.device).expand(heads, -1) for row in rows]
    flat = [at_zero(rope, q_QLD, pos_QL) for q_QLD, pos_QL in zip(q_RQLD, positions, strict=True)]
    return torch.cat((q_RQLD, torch.stack(flat)), -1), torch.nn.functional.pad(k_RHLD, (0, k_RHLD.shape[-1]))
