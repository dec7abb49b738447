"""Stacks of conf/ composed once a process, for tests that resolve the same ones again and again; conf/ does not change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from harness.configure import compose

Composed = tuple[dict[str, Any], dict[str, Any]]


def compose_stack(name: str, changes: Sequence[str]) -> Composed:
    """As harness.configure.compose.compose_stack; what it returns is the caller's own."""
    return deepcopy(_composed(name, tuple(changes)))


@cache
def _composed(name: str, changes: tuple[str, ...]) -> Composed:
    return compose.compose_stack(name, changes)
