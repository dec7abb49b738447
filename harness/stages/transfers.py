"""Numbers to a device and back in as few copies as possible: each one makes the host wait for all that it has launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SENT = WeakTensorKeyDictionary()  # of a tensor of the host, its copies by device


@lru_cache(maxsize=4096)
def numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers as an int64 index; sent once, for the same ones are asked for in every step. Never written to."""
    return torch.tensor(values, device=device)


@lru_cache(maxsize=64)
def places(start: int, n: int, device: torch.device) -> Tensor:
    """int32 start, start + 1 .. of n tokens; many sequences and layers stand at the same place. Never written to."""
    return torch.arange(start, start + n, dtype=torch.int32, device=device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A constant on a device; sent once, for it is asked for in every step. Never written to."""
    if x.device == device:
        return x
    if x not in _SENT:
        _SENT[x] = {}
    copies: dict[torch.device, Tensor] = _SENT[x]
    if device not in copies:
        copies[device] = x.to(device)
    return copies[device]


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, in order, with one copy for each device and dtype among them; those of the host as they are."""
    found = list(tensors)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if x.device.type != "cpu":
            kinds.setdefault((x.device, x.dtype), []).append(i)
    for places in kinds.values():
        joined = torch.cat([tensors[i].reshape(-1) for i in places]).cpu()
        for i, x in zip(places, joined.split([tensors[i].numel() for i in places]), strict=True):  # type: ignore[no-untyped-call]
            found[i] = x.view(tensors[i].shape)
    return found
