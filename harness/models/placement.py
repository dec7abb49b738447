"""Where the parts of a model lie: on one device, or spread over several by a device map."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable

import torch

from harness.errors import UserError
from harness.kv.compat import device_of

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's own ways to spread a model


def usable_device(name: str, key: str = "model.device", besides: str = "") -> torch.device:
    """The device of this name; "auto" is CUDA where there is one. UserError if this machine lacks it.

    key, besides: of the setting, and what else is allowed there, for the error.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{key}={name!r} is not possible: {besides or 'auto'}, cpu, cuda, cuda:N or mps") from None
    usable = {
        "cpu": True,
        "cuda": torch.cuda.device_count() > (device.index or 0),
        "mps": torch.backends.mps.is_available(),
    }
    if not usable.get(device.type, False):
        raise UserError(f"{key}={name!r} is not possible: this machine has no such device")
    return device


def check_map(device_map: str, device: str) -> None:
    """UserError for a device map that is none, that goes with a `device` of its own, or that lacks accelerate."""
    if device != "auto":
        raise UserError(
            f"model.device_map={device_map!r} is not possible with model.device={device!r}: a map says where every part lies; "
            "give one of the two"
        )
    if device_map not in MAPS:
        usable_device(device_map, "model.device_map", ", ".join(MAPS))
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(f"model.device_map={device_map!r} is not possible: it needs `pip install accelerate`")


def kind_of_device(device: str, device_map: str | None) -> str:
    """Of these settings on this machine: cpu, cuda or mps, whose numbers differ in the last digits."""
    name = device if device_map is None or device_map in MAPS else device_map
    return usable_device(name).type if name == "auto" else name.partition(":")[0]


def input_device(model: torch.nn.Module) -> torch.device:
    """Where token ids go in."""
    return device_of(model.get_input_embeddings())  # type: ignore[operator]


def clock(devices: Iterable[torch.device]) -> float:
    """Seconds of `time.perf_counter`, once everything launched on these devices is done: a host runs ahead of them."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
    return time.perf_counter()
