"""Matrix products whose bits do not depend on company: every weight meets tiles of one fixed number of rows. It knows no cache.

A library picks another way of summing for another number of rows, so a request's logits would change with whatever shares its
batch. In a tile of TILE rows, filled up with zeros, the product always has one shape, and a row's sums do not depend on the
others'. Norms, activations and rotations treat every token by itself, attention every row by its own store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

TILE = 16  # rows: as many as a usual batch decodes at a time

_ON: ContextVar[bool] = ContextVar("kv_harness_tiles", default=False)


@contextmanager
def tiles(on: bool) -> Iterator[None]:
    """Inside, the products of prepared models run in tiles."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


def prepare(model: torch.nn.Module) -> None:
    """Let a model's linear layers run in tiles where `tiles` asks for it; elsewhere they are as they were."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and not hasattr(module, "untiled"):
            module.untiled = module.forward
            name = "_old_forward" if hasattr(module, "_old_forward") else "forward"  # inside a device map's hook, which moves x
            setattr(module, name, _tiled(getattr(module, name)))


def _tiled(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not _ON.get():
            return product(x)
        rows = x.reshape(-1, x.shape[-1])
        n = rows.shape[0]
        if n % TILE:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, TILE - n % TILE))
        out = [product(tile) for tile in torch.split(rows, TILE)]  # type: ignore[no-untyped-call]
        if isinstance(out[0], tuple):  # a router of experts: scores and logits of every row
            return tuple(_whole(list(one), n, x) for one in zip(*out, strict=True))  # type: ignore[return-value]
        return _whole(out, n, x)

    return forward


def _whole(tiles: list[Tensor], n: int, x: Tensor) -> Tensor:
    """The first n rows of all tiles, in the shape of x."""
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:n].view(*x.shape[:-1], -1)
