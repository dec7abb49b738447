"""From a composed configuration to the (stack, point) cells of a run; it knows no model and no record.

Hydra composes every stack of a list by itself, so that each may have its own parts; the command line's changes go to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from harness.composition import CompositionError, said
from harness.run.identity import digest
from harness.stages.stack import Stack
from harness.types import UserError, require

FULL = "full"


@dataclass(frozen=True)
class Cell:
    """One stack at one point, with its resolved configuration.

    failure: why none of its records can be made (one line, traceback), where its calibration failed.
    """

    label: str
    point: dict[str, Any]
    config: dict[str, Any]
    stack: Stack
    failure: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Label and point, for messages."""
        return self.label + "".join(f" {k}={v}" for k, v in self.point.items())


def key_of(override: str) -> str:
    """The key of a Hydra override."""
    return override.split("=", 1)[0].lstrip("+~")


def is_stack_override(override: str) -> bool:
    """Whether an override changes the stack: compress=, compress.x=, group@compress.x=."""
    key = key_of(override)
    return key == "compress" or key.startswith("compress.") or "@compress." in key


def cells(cfg: DictConfig, overrides: Sequence[str]) -> list[Cell]:
    """All cells of a run, the full cache first and once.

    Raises:
        UserError: a stack that does not exist or lacks a key, an illegal combination, a list given to `compress`.
    """
    chosen = next((o.split("=", 1)[1] for o in overrides if key_of(o) == "compress"), None)
    listed = any(key_of(o) == "stacks" for o in overrides)
    if chosen and listed:
        raise UserError(f"compress={chosen} together with stacks= is not possible: name every stack in stacks=[...]")
    stacks: Any = [FULL] if cfg.stacks is None else cfg.stacks
    stacks = OmegaConf.to_container(stacks) if OmegaConf.is_config(stacks) else stacks
    require(isinstance(stacks, list) and bool(stacks), "stacks", stacks, "a list of names, stacks=[a,b]")
    changes = [o for o in overrides if is_stack_override(o) and key_of(o) != "compress"]
    found = _stack_cells(FULL, [])
    for member in [chosen] if chosen else stacks:
        name, own = _member(member)
        if name != FULL:
            found += _stack_cells(name, [*own, *changes])
    return _once(found)


def _member(member: Any) -> tuple[str, list[str]]:
    """A member of `stacks`: a name, or a list of a name and the overrides of this stack alone."""
    name, *own = member if isinstance(member, list) and member else [member]
    known = isinstance(name, str) and all(isinstance(o, str) and is_stack_override(o) for o in own)
    allowed = "a name, or [NAME, compress.KEY=VALUE, group@compress.KEY=NAME, ...]"
    require(known and not any(key_of(o) == "compress" for o in own), "stacks", member, allowed)
    return name, own


def _once(found: list[Cell]) -> list[Cell]:
    """Cells that differ in their configuration; two labels for one configuration would be two points for one."""
    unique: dict[str, Cell] = {}
    for cell in found:
        unique.setdefault(repr((sorted(cell.config.items(), key=str), cell.point)), cell)
    return list(unique.values())


def _compose(name: str, changes: Sequence[str]) -> DictConfig:
    try:
        compress: DictConfig = hydra.compose("config", overrides=[f"compress={name}", *changes]).compress
        OmegaConf.resolve(compress)
        return compress
    except CompositionError as error:
        raise UserError(f"stack {name!r}: {said(error)}") from None


def _stack_cells(name: str, changes: Sequence[str]) -> list[Cell]:
    base = _compose(name, changes)
    points = _points(base, changes)
    label = name if not changes or _same_stack(base, _compose(name, []), points) else None
    return [_cell(base, name, label, point) for point in points]


def _points(base: DictConfig, changes: Sequence[str]) -> list[dict[str, Any]]:
    """The stack's points; a key given on the command line takes the place of its list of values."""
    points: list[dict[str, Any]] = OmegaConf.to_container(base.get("points", OmegaConf.create([{}])))  # type: ignore[assignment]
    require(
        isinstance(points, list) and bool(points), "compress.points", points, "a list of points, [{}] where there is no knob"
    )
    if any(key_of(o) == "compress.points" for o in changes):
        return points
    for key in (key_of(o).removeprefix("compress.") for o in changes):
        if any(key in point for point in points):
            value = OmegaConf.select(base, key)
            points = [{**point, key: value} for point in points]
    return [dict(p) for p in dict.fromkeys(tuple(point.items()) for point in points)]


def _same_stack(base: DictConfig, pristine: DictConfig, points: list[dict[str, Any]]) -> bool:
    """Whether nothing but points was changed from the stack's own file."""

    def bare(config: DictConfig) -> Any:
        config = config.copy()
        for key in {key for point in points for key in point}:
            OmegaConf.update(config, key, None, force_add=True)
        OmegaConf.update(config, "points", None)
        return OmegaConf.to_container(config)

    return bool(bare(base) == bare(pristine))


def _cell(base: DictConfig, name: str, label: str | None, point: dict[str, Any]) -> Cell:
    config = base.copy()
    for key, value in point.items():
        if OmegaConf.select(config, key, default=Ellipsis) is Ellipsis:
            raise UserError(f"stack {name!r} has no key {key!r}, which its point {point} sets")
        OmegaConf.update(config, key, value)
    plain: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    plain = {k: v for k, v in plain.items() if k not in ("name", "points")}
    stack = build(plain, f"stack {name!r}" + (f" at {point}" if point else ""))
    return Cell(label or _resolved_label(stack, base, plain), dict(point), plain, stack)


def _resolved_label(stack: Stack, base: DictConfig, plain: dict[str, Any]) -> str:
    """Describe a changed stack; settings of its scorer and budgets that a label of parts cannot show are spelled out."""
    keep = plain.get("keep") or {}
    settings = [f"_{k}{v}" for k, v in (keep.get("scorer") or {}).items() if k != "_target_"]
    for part in (keep.get(name) or {} for name in ("layers", "heads")):
        shown = {k: digest(v)[:8] if isinstance(v, list) else v for k, v in part.items() if k != "_target_" and v is not None}
        settings += [f"_{k}{v}" for k, v in shown.items()]
    return stack.describe() + "".join(dict.fromkeys(settings))


def build(config: dict[str, Any], where: str) -> Any:
    """Instantiate a `_target_` tree; whatever is wrong with it becomes one UserError that starts with `where`."""
    try:
        return hydra.utils.instantiate(config, _convert_="all")
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise UserError(f"{where}: {cause}") from None
        raise UserError(f"{where}: {_first_line(cause)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
