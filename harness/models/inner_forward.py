"""A module's own forward, replaced once and beneath the hook that a device map puts around it: the hook moves its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[..., Any]
MARK = "replaced_forward"  # set on a module when that was done


def inner(module: torch.nn.Module) -> Forward:
    """The module's forward, without a device map's hook."""
    forward: Forward = getattr(module, _name(module))
    return forward


def replace(module: torch.nn.Module, forward: Forward) -> None:
    """Put another in its place."""
    setattr(module, _name(module), forward)
    setattr(module, MARK, True)


def is_replaced(module: torch.nn.Module) -> bool:
    """Whether that was done before: several engines may share a model."""
    return hasattr(module, MARK)


def _name(module: torch.nn.Module) -> str:
    return "_old_forward" if hasattr(module, "_old_forward") else "forward"
