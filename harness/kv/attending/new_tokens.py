"""The new tokens of a forward in a group of layers: where attention and the stores find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NewTokens:
    """keys, values: [B, layers, H, L, D], in the cache dtype.

    to_copy: by layer what views have to copy, one tensor [2, B, H, L, D], or where keys and values differ in width two of
    [1, ...]; empty without views, or where these tokens lie in them.
    """

    keys: Tensor
    values: Tensor
    to_copy: Sequence[tuple[Tensor, ...]] = ()

    @cached_property
    def by_layer(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [B, H, L, D]."""
        return list(zip(self.keys.unbind(1), self.values.unbind(1), strict=True))

    @classmethod
    def apart(cls, key: Tensor, value: Tensor, layers: int, dtype: torch.dtype, *, views: bool) -> NewTokens:
        """Room in tensors of their own, for layers that are like the one with these new tokens [B, H, L, D]."""
        size = (len(key), layers, *key.shape[1:-1])
        if views and key.shape == value.shape:  # views take both in one go
            both = [torch.empty(2, *size, key.shape[-1], dtype=dtype, device=key.device)]
        else:
            both = [torch.empty(1, *size, x.shape[-1], dtype=dtype, device=x.device) for x in (key, value)]
        to_copy = list(zip(*(x.unbind(2) for x in both), strict=True)) if views else ()
        return cls(both[0][0], both[-1][-1], to_copy)

    @classmethod
    def inside(cls, places: Sequence[Tensor]) -> NewTokens:
        """Room in views of the whole batch: their places [2, layers, B, H, L, D], or two of [1, ...]."""
        return cls(places[0][0].transpose(0, 1), places[-1][-1].transpose(0, 1))
