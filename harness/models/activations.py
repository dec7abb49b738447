"""Activation functions whose bits do not depend on company: computed in one thread. It knows no cache.

The numbers at the end of a thread's share of a tensor, which fill no vector register, are computed by another function than the
others, and where a share ends depends on how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2CLS

from harness.models.inner_forward import inner, is_replaced, replace

KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})


def prepare(model: torch.nn.Module, on: Callable[[], bool]) -> None:
    """Let a model's activation functions run in one thread of a CPU while `on()`; elsewhere they are as they were."""
    for module in model.modules():
        if isinstance(module, KINDS) and not is_replaced(module):
            replace(module, _alone(inner(module), on))


def _alone(plain: Callable[..., Tensor], on: Callable[[], bool]) -> Callable[..., Tensor]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        threads = torch.get_num_threads()
        if threads == 1 or x.device.type != "cpu" or not on():
            return plain(x, *args, **kwargs)
        torch.set_num_threads(1)
        try:
            return plain(x, *args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return forward
