"""Tensors of the make-believe accelerator: each wraps a CPU tensor and says that it lies somewhere else.

The device type is one that torch knows and never initialises, so that factories with `device=` reach the dispatcher.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

KIND = "lazy"
FIRST, SECOND = torch.device(KIND, 0), torch.device(KIND, 1)


class MixedDevicesError(RuntimeError):
    """Operands on different devices, where an accelerator would refuse them."""


class OnDevice(Tensor):
    """A tensor on the device. host: its numbers, with the same sizes, strides and offset."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> OnDevice:
        alike = torch.is_inference_mode_enabled() == host.is_inference()
        with nullcontext() if alike else torch.inference_mode(host.is_inference()):
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=device
            )
        made.host = host
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MixedDevicesError(f"{func} while the accelerator is switched off")

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"a tensor on {self.device} has no numpy array: copy it to the host first")

    __array__ = numpy

    def __getitem__(self, index: Any) -> Any:
        """torch turns lists into host tensors in C++, which would look for a real device."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, list) for part in parts):
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
        return super().__getitem__(index)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({tuple(self.shape)}, {self.dtype}, {self.device})"


def away(device: object) -> bool:
    """Whether a device, given as whatever torch takes for one, is a make-believe one."""
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, torch.device) and device.type == KIND
