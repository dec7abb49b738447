"""Products with weights that are not those of a linear layer (experts, their routers), in tiles; it knows no cache.

How many tokens an expert is given depends on what shares the batch, and a library sums in another way for another number. So
inside `tiles` such modules run as their own file defines them, expert by expert, and every product in tiles of TILE tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from harness.models.inner_forward import inner, is_replaced, replace

LINEAR = (torch.nn.functional.linear,)
MATMUL = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm)
OTHERS = (torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)  # in tiles, or products of no rows


def prepare(model: torch.nn.Module, on: Callable[[], bool], tile: int) -> None:
    """Let a model's other modules with matrices of their own multiply in tiles of `tile` rows while `on()`."""
    for module in model.modules():
        own = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        own = own or _routes(module)  # some reach for the weight of a linear layer inside them
        if own and not isinstance(module, OTHERS) and not is_replaced(module):
            replace(module, _tiled(module, inner(module), on, tile))


def _tiled(module: torch.nn.Module, plain: Callable[..., Any], on: Callable[[], bool], tile: int) -> Callable[..., Any]:
    # transformers swaps the forward of experts for a kernel over all of them at once: beneath is their definition.
    own, routes = MethodType(inspect.unwrap(type(module).forward), module), _routes(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not on():
            return plain(*args, **kwargs)
        with _Products(tile):
            if routes and len(args) == 1 and not kwargs:
                return _by_tokens(own, args[0], tile)
            return own(*args, **kwargs)

    return forward


def _routes(module: torch.nn.Module) -> bool:
    return "Router" in type(module).__name__


def _by_tokens(router: Callable[[Tensor], Any], x: Tensor, tile: int) -> Any:
    """A router of tokens x [..., D], tile by tile.

    Of few experts even a sigmoid's last bit depends on how many tokens there are: numbers at the end of a tensor that fill no
    vector register are computed by another function.
    """
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -n % tile))
    parts = [router(part if x.dim() == 2 else part[None]) for part in rows.split(tile)]  # type: ignore[no-untyped-call]
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(one), n, x) for one in zip(*parts, strict=True))
    return _joined(parts, n, x)


def _joined(parts: list[Tensor], n: int, x: Tensor) -> Tensor:
    """What a router says of n tokens: [n, E], or in the shape of x where it keeps that."""
    if parts[0].dim() == 2:
        return torch.cat(parts)[:n]
    return torch.cat(parts, 1)[0, :n].view(*x.shape[:-1], -1)


class _Products(TorchFunctionMode):
    """Inside, every product of rows with a weight is one of tiles of so many rows."""

    def __init__(self, tile: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tile = tile

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LINEAR or (func in MATMUL and args[1].dim() == 2):
            x = args[0].reshape(-1, args[0].shape[-1])
            return self._product(func, x, args[1:], kwargs).view(*args[0].shape[:-1], -1)
        if func in MATMUL and args[0].dim() == args[1].dim() == 3:  # all experts, each with rows and a weight of its own
            return self._product(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Callable[..., Tensor], x: Tensor, weights: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """X [..., N, D] times weights, tile by tile."""
        n = x.shape[-2]
        x = torch.nn.functional.pad(x, (0, 0, 0, -n % self.tile))
        found = [func(part, *weights, **kwargs) for part in x.split(self.tile, -2)]  # type: ignore[no-untyped-call]
        return torch.cat(found, -2)[..., :n, :].contiguous()
