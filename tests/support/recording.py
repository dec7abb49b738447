"""Queries and keys as the model's attention got them, layer by layer and forward by forward; it changes nothing of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from harness.kv.attention import NAME, attend

Recorded = dict[int, list[tuple[Tensor, Tensor]]]
"""For each layer, a (query [Q, L, D], key [H, L, D]) pair for each forward of one batch row, rotated, before any storage."""


@contextmanager
def recording(layers: tuple[int, ...], values: dict[int, list[Tensor]] | None = None) -> Iterator[Recorded]:
    """Record these layers of every forward inside; `values` takes their values [H, L, D], forward by forward."""
    found: Recorded = {layer: [] for layer in layers}

    def wrapped(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if module.layer_idx in found:
            found[module.layer_idx].append((query[0].clone(), key[0].clone()))
            if values is not None:
                values.setdefault(module.layer_idx, []).append(args[0][0].clone())
        return attend(module, query, key, *args, **kwargs)

    AttentionInterface.register(NAME, wrapped)
    try:
        yield found
    finally:
        AttentionInterface.register(NAME, attend)


def keys(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Keys of all tokens of the run, [H, T, D]."""
    return torch.cat([k for _, k in found], 1)


def queries(found: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Queries of each forward, [Q, L, D]."""
    return [q for q, _ in found]
