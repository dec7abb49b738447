"""From a composed configuration to the (stack, point) cells of a run; it knows no model and no record.

Hydra composes every stack of a list by itself, so that each may have its own parts; the command line's changes go to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from harness.configure.hydra_errors import CompositionError, said
from harness.configure.typed import TARGET, escaped, made
from harness.errors import UserError, require
from harness.files.digests import digest
from harness.stages.stack import Stack, unused

FULL = "full"


@dataclass(frozen=True)
class Arm:
    """One stack at one point, with its resolved configuration.

    failure: why none of its records can be made (one line, traceback), where its calibration failed.
    """

    label: str
    point: dict[str, Any]
    config: dict[str, Any]
    stack: Stack
    spellings: tuple[str, ...] = ()  # what was asked for; several where it comes to the same
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


def arms_of(cfg: DictConfig, overrides: Sequence[str]) -> list[Arm]:
    """All cells of a run, the full cache first and once.

    Raises:
        UserError: a stack that does not exist or lacks a key, an illegal combination, a list given to `compress`, a change
            that nothing would come of.
    """
    chosen = _chosen(overrides)
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
        elif own or changes:
            found += _changed_full(found[0].stack, [*own, *changes])
    return _once(found)


def _chosen(overrides: Sequence[str]) -> str | None:
    """The name that `compress=` gives, its quotes read; None where there is no such override."""
    given = [o for o in overrides if key_of(o) == "compress"]
    if not given:
        return None
    override = OverridesParser.create().parse_override(given[-1])  # of several the last one holds, as everywhere in Hydra
    value = None if override.is_delete() else override.value()
    name = getattr(value, "text", value)
    allowed = "the name of one stack; without it the stacks of the experiment run, stacks=null runs the full cache alone"
    require(isinstance(name, str) and bool(name), "compress", name, allowed)
    return str(name)


def _changed_full(full: Stack, changes: Sequence[str]) -> list[Arm]:
    """The full cache with other parts is a stack of its own; changes that leave it the full cache are refused."""
    found = _stack_cells(FULL, changes)
    for cell in found:
        same = replace(cell.stack, phase=full.phase, chunk=full.chunk, every=full.every, read=full.read) == full
        if same:
            raise UserError(f"{' '.join(changes)} changes nothing of the full cache, which every run has: name another stack")
    return found


def _member(member: Any) -> tuple[str, list[str]]:
    """A member of `stacks`: a name, or a list of a name and the overrides of this stack alone."""
    name, *own = member if isinstance(member, list) and member else [member]
    known = isinstance(name, str) and all(isinstance(o, str) and is_stack_override(o) for o in own)
    allowed = "a name, or [NAME, compress.KEY=VALUE, group@compress.KEY=NAME, ...]"
    require(known and not any(key_of(o) == "compress" for o in own), "stacks", member, allowed)
    return name, own


def _once(found: list[Arm]) -> list[Arm]:
    """Cells that differ in what they resolve to, each with all its spellings; two labels of one would be two points for one."""
    unique: dict[str, Arm] = {}
    for cell in found:
        first = unique.setdefault(digest(_plain_numbers(cell.config)), cell)
        spellings = tuple(dict.fromkeys((*first.spellings, *cell.spellings)))
        unique[digest(_plain_numbers(first.config))] = replace(first, spellings=spellings)
    return list(unique.values())


def _plain_numbers(value: Any) -> Any:
    """A configuration in which 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _used(cell: Arm, asked: Sequence[str]) -> Arm:
    """The cell with settings that its phase does not use at their defaults, and how it was asked for."""
    idle = {name: value for name, value in unused(cell.stack.keep, cell.stack.phase).items() if name in cell.config}
    point = (f"{key}={value}" for key, value in cell.point.items())
    config, stack = cell.config | idle, replace(cell.stack, **idle)
    return replace(cell, config=config, stack=stack, spellings=(" ".join([*asked, *point]),))


def _compose(name: str, changes: Sequence[str]) -> DictConfig:
    try:
        composed = hydra.compose("config", overrides=[f"compress={name}", *changes]).compress
        compress: DictConfig = OmegaConf.create(escaped(OmegaConf.to_container(composed, resolve=True)))
    except CompositionError as error:
        raise UserError(f"stack {name!r}: {said(error)}") from None
    renamed = next((change for change in changes if key_of(change) == "compress.name"), None)
    require(renamed is None, "compress.name", renamed, "a changed stack is called by its parts, a YAML by its file")
    for change in changes:  # a part for a slot that the stack's own file empties again would be lost
        group, at, place = key_of(change).partition("@compress.")
        lost = at and not change.startswith("~") and OmegaConf.select(compress, place) is None
        require(not lost, group + at + place, change.split("=", 1)[-1], f"stack {name!r} has no {place}: choose one that has")
    return compress


def _stack_cells(name: str, changes: Sequence[str]) -> list[Arm]:
    base = _compose(name, changes)
    points = _points(base, changes)
    label = name if not changes or _same_stack(base, _compose(name, []), points) else None
    return [_used(_cell(base, name, label, point), [name, *changes]) for point in points]


def _points(base: DictConfig, changes: Sequence[str]) -> list[dict[str, Any]]:
    """The stack's points; a key given on the command line takes the place of its list of values."""
    points: Any = OmegaConf.to_container(base, resolve=True).get("points", [{}])  # type: ignore[union-attr]
    fits = isinstance(points, list) and bool(points) and all(isinstance(point, dict) for point in points)
    fits = fits and all(isinstance(key, str) for point in points for key in point)
    require(fits, "compress.points", points, "a list of points, such as {keep.budget.value: 0.5}; [{}] where there is no knob")
    given = any(key_of(o) == "compress.points" for o in changes)
    for key, value in (one for change in changes for one in _values(change)):
        if any(key in point for point in points):
            require(not given, f"compress.{key}", value, "compress.points sets it too: give one of the two")
            points = [{**point, key: OmegaConf.select(base, key)} for point in points]
    unique = {repr(sorted(point.items(), key=str)): point for point in points}
    return list(unique.values())


def _values(change: str) -> Iterator[tuple[str, Any]]:
    """(dotted key inside the stack, value) of all that a command line's change of a value sets; nothing of a chosen part."""

    def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            for name, one in value.items():
                yield from leaves(f"{key}.{getattr(name, 'text', name)}", one)
        else:
            yield key, value

    override = OverridesParser.create().parse_override(change)
    if "@" not in key_of(change) and not override.is_delete():
        yield from leaves(key_of(change).removeprefix("compress."), override.value())


def _same_stack(base: DictConfig, pristine: DictConfig, points: list[dict[str, Any]]) -> bool:
    """Whether nothing but points was changed from the stack's own file."""

    def bare(config: DictConfig) -> Any:
        config = config.copy()
        idle = unused(config.get("keep"), config.get("phase"))
        for key in {*idle, *(key for point in points for key in point)}:
            OmegaConf.update(config, key, None, force_add=True)
        OmegaConf.update(config, "points", None)
        return OmegaConf.to_container(config)

    return bool(bare(base) == bare(pristine))


def _cell(base: DictConfig, name: str, label: str | None, point: dict[str, Any]) -> Arm:
    config = base.copy()
    for key, value in point.items():
        if OmegaConf.select(config, key, default=Ellipsis) is Ellipsis:
            raise UserError(f"stack {name!r} has no key {key!r}, which its point {point} sets")
        OmegaConf.update(config, key, escaped(value))
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    plain = {k: v for k, v in plain.items() if k not in ("name", "points")}
    where = f"stack {name!r}" + (f" at {point}" if point else "")
    stack = build(plain, where)
    if not isinstance(stack, Stack):
        raise UserError(f"{where}: compress._target_={plain[TARGET]!r} makes no harness.stages.stack.Stack")
    return Arm(label or _resolved_label(stack, base, plain), dict(point), plain, stack)


def _resolved_label(stack: Stack, base: DictConfig, plain: dict[str, Any]) -> str:
    """Describe a changed stack; settings of its scorer and budgets that a label of parts cannot show are spelled out."""
    keep = plain.get("keep") or {}
    settings = [f"_{k}{v}" for k, v in (keep.get("scorer") or {}).items() if k != "_target_"]
    for part in (keep.get(name) or {} for name in ("layers", "heads")):
        shown = {k: digest(v)[:8] if isinstance(v, list) else v for k, v in part.items() if k != "_target_" and v is not None}
        settings += [f"_{k}{v}" for k, v in shown.items()]
    return stack.describe() + "".join(dict.fromkeys(settings))


def build(config: dict[str, Any], where: str) -> Any:
    """Instantiate a `_target_` tree; whatever is wrong with it becomes one UserError that starts with `where`.

    Args:
        config: resolved; its values are checked against the constructors' annotations first.
        where: a top-level key such as `task`, or words that name the stack.
    """
    root = where if where.isidentifier() else "compress"
    require(isinstance(config, Mapping) and TARGET in config, root, config, f"a member of conf/{root}")
    try:
        return made(config, root)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise UserError(f"{where}: {cause}") from None
        raise UserError(f"{where}: {_first_line(cause)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
