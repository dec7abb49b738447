"""Runs every operator on the host tensors inside, refuses what an accelerator would, and counts what it would cost.

A synchronisation is whatever makes the host wait: a number or a tensor read, a shape that depends on data, and an upload, for
host data that is not pinned is copied before the call returns. A kernel is a call that is no view, no allocation and not empty.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.make_believe.tensors import KIND, MixedDevicesError, OnDevice, away

HERE, OWN = f"{Path(__file__).parent}/", f"{Path(__file__).parents[3]}/"
CPU = torch.device("cpu")

DATA_SHAPED = {"nonzero", "masked_select", "argwhere", "bincount", "equal", "unique_dim", "unique_consecutive", "_unique2"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
NO_WORK = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "lift_fresh"}
NO_HOST_SCALARS = {"cat", "stack", "index_select", "gather", "scatter", "mm", "bmm", "addmm", "baddbmm", "embedding"}
ONE_KERNEL = {"scaled_dot_product_attention"}  # what it is made of depends on the device


@dataclass
class Costs:
    """What was done so far. reads, uploads, moves: by the line of the project that caused them."""

    reads: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)  # between two devices; the host does not wait
    waits: int = 0  # explicit: a clock that is read
    kernels: int = 0

    @property
    def synchronisations(self) -> int:
        return self.reads.total() + self.uploads.total()

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            self.reads - other.reads,
            self.uploads - other.uploads,
            self.moves - other.moves,
            self.waits - other.waits,
            self.kernels - other.kernels,
        )

    def copy(self) -> Costs:
        return Costs(self.reads.copy(), self.uploads.copy(), self.moves.copy(), self.waits, self.kernels)


class Accelerator(TorchDispatchMode):
    """Make-believe devices while it is entered. lacks: dtypes that they do not have."""

    def __init__(self, lacks: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.lacks = frozenset(lacks)
        self.costs = Costs()

    @contextmanager
    def on(self) -> Iterator[Accelerator]:
        """Switched on, with what torch does not hand to a dispatch mode: tensors made of host data, and waiting."""
        known = torch.is_autocast_enabled

        def autocast(kind: str | None = None) -> bool:
            return kind != KIND and (known() if kind is None else known(kind))

        with (
            mock.patch.object(torch, "tensor", self._maker(torch.tensor)),
            mock.patch.object(torch, "as_tensor", self._maker(torch.as_tensor)),
            mock.patch.object(OnDevice, "new_tensor", self._new_tensor(), create=True),
            mock.patch.object(torch, "is_autocast_enabled", autocast),
            mock.patch.object(torch.accelerator, "synchronize", self._wait),
            self,
        ):
            yield self

    def _wait(self, device: object = None) -> None:
        assert away(device), f"{device} is waited for"
        self.costs.waits += 1

    def _maker(self, make: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not away(device) or isinstance(data, OnDevice):
                found: Tensor = make(data, *args, device=device, **kwargs)
                return found
            return self._uploaded(make(data, *args, **kwargs), torch.device(device))

        return made

    def _new_tensor(self) -> Any:
        make = torch.tensor

        def new_tensor(like: Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
            return self._uploaded(make(data, dtype=dtype or like.dtype), torch.device(device or like.device))

        return new_tensor

    def _uploaded(self, host: Tensor, device: torch.device) -> Tensor:
        self.costs.uploads[_line()] += 1
        self._refuse_dtypes("an upload", [host])
        return OnDevice(host, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [*_leaves(args), *_leaves(kwargs.values())]
        if not any(isinstance(x, OnDevice) for x in flat) and not away(kwargs.get("device")):
            return func(*args, **kwargs)
        name, composite, _ = _about(func)
        if composite and name not in ONE_KERNEL:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "_to_copy":
            return self._copied(func, args[0], kwargs)
        if name == "copy_":
            return self._written(func, args, kwargs)
        device = self._place(func, name, flat, kwargs.get("device"))
        if (
            name == "_local_scalar_dense"
            or name in DATA_SHAPED
            or (name, func._overloadname) == ("repeat_interleave", "Tensor")
        ):
            self.costs.reads[_line()] += 1
        out = func(*map(_unwrapped, args), **{key: _unwrapped(x) for key, x in kwargs.items()})
        made = [x for x in _leaves([out]) if isinstance(x, Tensor)]
        self._count(func, name, [*made, *(x for x in flat if isinstance(x, Tensor))], made)
        return _wrapped(out, [x for x in flat if isinstance(x, OnDevice)], device)

    # ---- where results lie

    def _place(self, func: Any, name: str, flat: Sequence[Any], asked: torch.device | None) -> torch.device | None:
        """The device of the result; MixedDevicesError where the operands do not go together."""
        if name in INDEXED:
            return self._indexed(func, name, [x for x in flat if isinstance(x, Tensor)])
        mine = [x for x in flat if isinstance(x, OnDevice)]
        hosts = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
        if mine:
            apart = any(x.dim() for x in mine if x.device != mine[0].device)
            large = any(x.dim() or name in NO_HOST_SCALARS for x in hosts)
            writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
            into_host = writes and any(flat[0] is x for x in hosts)
            if apart or large or into_host or (len(hosts) > 1 and name != "where"):
                raise MixedDevicesError(f"{func}({', '.join(_shown(x) for x in flat if isinstance(x, Tensor))})")
        if asked is not None:
            return asked if away(asked) else None
        return mine[0].device if mine else None

    def _indexed(self, func: Any, name: str, tensors: Sequence[Tensor]) -> torch.device:
        """A tensor indexed by others: host indices are uploaded, masks are read for their size."""
        of, *indices = tensors
        values = indices.pop() if "put" in name else None
        wrong = not isinstance(of, OnDevice)
        for index in indices:
            wrong |= isinstance(index, OnDevice) and index.device != of.device
            if not isinstance(index, OnDevice):
                self.costs.uploads[_line()] += 1
            if index.dtype in (torch.bool, torch.uint8):
                self.costs.reads[_line()] += 1
        wrong |= values is not None and values.device != of.device and values.dim() > 0
        if wrong:
            raise MixedDevicesError(f"{func}({', '.join(map(_shown, tensors))})")
        return of.device

    # ---- copies

    def _copied(self, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """`.to(...)`, within a device or from one to another."""
        to = kwargs.get("device") or source.device
        out: Tensor = func(source.host if isinstance(source, OnDevice) else source, **{**kwargs, "device": CPU})
        self._crossed(source.device, to)
        if away(to):
            self._refuse_dtypes("a copy", [out])
        if source.device == to or (isinstance(source, OnDevice) and source.dtype != out.dtype):
            self._count(func, "_to_copy", [out], [out])  # a cast on the way to the host is made on the device
        return OnDevice(out, to) if away(to) else out

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """`a.copy_(b)`."""
        into, source = args[0], args[1]
        if source.dim() or isinstance(source, OnDevice):  # a number of the host is an argument of the kernel
            self._crossed(source.device, into.device)
        a, b = (x.host if isinstance(x, OnDevice) else x for x in (into, source))
        func(a, b, *args[2:], **kwargs)
        self._count(func, "copy_", [a], [a])
        return into  # type: ignore[no-any-return]

    def _crossed(self, source: torch.device, to: torch.device) -> None:
        if source != to:
            costs = self.costs
            where = costs.uploads if not away(source) else costs.moves if away(to) else costs.reads
            where[_line()] += 1

    # ---- costs

    def _count(self, func: Any, name: str, seen: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        self._refuse_dtypes(str(func), seen)
        _, _, view = _about(func)
        if not view and name not in NO_WORK and any(x.numel() for x in out):
            self.costs.kernels += 1

    def _refuse_dtypes(self, what: str, seen: Sequence[Tensor]) -> None:
        if missing := self.lacks & {x.dtype for x in seen}:
            raise TypeError(f"{what}: the device has no {', '.join(map(str, missing))}")


@cache
def _about(func: Any) -> tuple[str, bool, bool]:
    """An operator's name, whether it is made of others, and whether its result is a view."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return func._schema.name.split("::")[-1], composite, view


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, list | tuple):
            yield from _leaves(x)
        else:
            yield x


def _unwrapped(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_unwrapped, x))
    return x.host if isinstance(x, OnDevice) else CPU if isinstance(x, torch.device) else x


def _wrapped(out: Any, mine: Sequence[OnDevice], device: torch.device | None) -> Any:
    """Results as tensors of the device; one that was written in place is the argument itself."""
    if isinstance(out, list | tuple):
        return type(out)(_wrapped(x, mine, device) for x in out)
    if not isinstance(out, Tensor):
        return out
    same = next((one for one in mine if one.host is out), None)
    return same if same is not None else OnDevice(out, device) if device else out


def _shown(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)} on {x.device}".removeprefix("torch.")


def _line() -> str:
    """The innermost line of the project that is no part of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OWN) and not file.startswith(HERE) and "site-packages" not in file:
            return f"{file.removeprefix(OWN)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
