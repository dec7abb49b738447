"""Memory that attention's keys and values are decoded into, call after call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNED = 16  # elements: values begin where a fresh tensor would, on a boundary of 64 bytes in fp32


class Scratch:
    """One memory for the keys and values of every call of a forward's attention: what one leaves, the next writes over.

    A tensor of its own for each call would be new memory each time, filled page by page, and never in a core's cache.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._pairs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def pair(self, k_RHLD: Tensor, v_RHLD: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Uninitialised keys and values [R, H, tokens, D] of the dtype, device and widths of these."""
        (r, h, _, d_key), d_value = k_RHLD.shape, v_RHLD.shape[-1]
        key = (r, h, tokens, d_key, d_value, k_RHLD.dtype, k_RHLD.device)
        if key not in self._pairs:
            shapes = [(r, h, tokens, d) for d in (d_key, d_value)]
            sizes = [math.prod(shape) for shape in shapes]
            start = -(-sizes[0] // ALIGNED) * ALIGNED
            flat = self._of(k_RHLD, start + sizes[1])
            self._pairs[key] = (flat[: sizes[0]].view(shapes[0]), flat[start : start + sizes[1]].view(shapes[1]))
        return self._pairs[key]

    def _of(self, like: Tensor, size: int) -> Tensor:
        kind = (like.dtype, like.device)
        if kind not in self._memory or self._memory[kind].numel() < size:
            self._pairs.clear()  # views of what was too small
            self._memory[kind] = like.new_empty(size)
        return self._memory[kind]
