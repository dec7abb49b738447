"""The points of a stack: what its YAML lists, and what the command line says instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.configure.overrides import key_of, values
from harness.errors import require

Point = dict[str, Any]


def points(stack: DictConfig, changes: Sequence[str]) -> list[Point]:
    """Each once, in their order; a key that is changed on the command line takes the place of its list of values.

    Args:
        stack: a stack's resolved configuration, changes included.
        changes: the overrides that it was changed by.

    Raises:
        UserError: no list of points; a key given as a value and in compress.points.
    """
    found: Any = OmegaConf.to_container(stack, resolve=True).get("points", [{}])  # type: ignore[union-attr]
    fits = isinstance(found, list) and bool(found) and all(isinstance(point, dict) for point in found)
    fits = fits and all(isinstance(key, str) for point in found for key in point)
    require(fits, "compress.points", found, "a list of points, such as {keep.budget.value: 0.5}; [{}] where there is no knob")
    given = any(key_of(change) == "compress.points" for change in changes)
    for key, value in (one for change in changes for one in values(change)):
        if any(key in point for point in found):
            require(not given, f"compress.{key}", value, "compress.points sets it too: give one of the two")
            found = [{**point, key: OmegaConf.select(stack, key)} for point in found]
    unique = {repr(sorted(point.items(), key=str)): point for point in found}
    return list(unique.values())
