"""Matrix products whose bits do not depend on company: every weight meets tiles of a fixed number of rows. It knows no cache.

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

from harness.models.inner_forward import inner, is_replaced, replace
from harness.models.packed import Packed, packed

TILE = 16  # rows: as many as a usual batch decodes at a time
WIDER = (256, 128, 64, 32)  # rows of larger tiles, which are used only where they give the bits of tiles of TILE rows

Tried = dict[tuple[int, int, torch.dtype, torch.device], bool]
"""Whether tiles of so many rows, with so many threads, give the bits of tiles of TILE rows."""

_ON: ContextVar[bool] = ContextVar("kv_harness_tiles", default=False)


@contextmanager
def tiles(on: bool) -> Iterator[None]:
    """Inside, the products of prepared models run in tiles."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


def in_tiles() -> bool:
    """Whether this is inside `tiles`."""
    return _ON.get()


def prepare(model: torch.nn.Module) -> None:
    """Let a model's linear layers run in tiles where `tiles` asks for it; elsewhere they are as they were."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    new = [module for module in linear if not is_replaced(module)]
    tried = dict[tuple[int, ...], Tried]()
    for module, copy in zip(new, packed(new, TILE), strict=True):
        same = None if copy is None else tried.setdefault(copy.shape, {})  # copies of one shape lie in memory alike
        replace(module, Tiled(inner(module), copy, same, plain=type(module) in (torch.nn.Linear, Conv1D)).forward)


class Tiled:
    """A linear layer's product in tiles.

    copy: its weight in a library's own layout, if there is one. same: what was tried, for products that share it. plain: a
    subclass may do something else with its rows.
    """

    def __init__(
        self, product: Callable[[Tensor], Tensor], copy: Packed | None = None, same: Tried | None = None, *, plain: bool = True
    ) -> None:
        self.untiled, self.product, self.wider = product, copy or product, WIDER if plain else ()
        self._same: Tried = {} if same is None else same

    def forward(self, x: Tensor) -> Tensor:
        """X [..., D] times the weight: in tiles inside `tiles`, else in one call."""
        if not _ON.get():
            return self.untiled(x)
        rows = x.reshape(-1, x.shape[-1])
        n = rows.shape[0]
        if n % TILE:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, TILE - n % TILE))
        out = [self.product(tile) for tile in rows.split(self._sizes(rows))]  # type: ignore[no-untyped-call]
        if isinstance(out[0], tuple):  # a router of experts: scores and logits of every row
            return tuple(_whole(list(one), n, x) for one in zip(*out, strict=True))  # type: ignore[return-value]
        return _whole(out, n, x)

    def _sizes(self, rows: Tensor) -> list[int]:
        """How many rows each call gets: the largest tiles first."""
        sizes, left = list[int](), rows.shape[0]
        for width in self.wider if rows.device.type == "cpu" else ():  # elsewhere the host would wait for the trial
            if left >= width and self._alike(rows, width):
                sizes += [width] * (left // width)
                left %= width
        return sizes + [TILE] * (left // TILE)

    def _alike(self, rows: Tensor, width: int) -> bool:
        """Whether tiles of `width` rows give the same bits as tiles of TILE rows: tried once, on noise.

        Which way a library sums is decided by shapes, threads and the machine, not by the numbers.
        """
        key = (width, torch.get_num_threads(), rows.dtype, rows.device)
        if key not in self._same:
            seed = torch.Generator().manual_seed(0)
            noise = torch.randn(width, rows.shape[1], generator=seed).to(rows.device, rows.dtype)
            by_tile = torch.cat([self.product(tile) for tile in noise.split(TILE)])  # type: ignore[no-untyped-call]
            self._same[key] = torch.equal(self.product(noise), by_tile)
        return self._same[key]


def _whole(tiles: list[Tensor], n: int, x: Tensor) -> Tensor:
    """The first n rows of all tiles, in the shape of x."""
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:n].view(*x.shape[:-1], -1)
