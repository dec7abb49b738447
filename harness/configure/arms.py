"""From a configuration to the arms of a run: every stack that was asked for, at each of its points.

Each stack of a list is composed alone, so that it may have its own parts; the command line's changes go to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import normalize

from omegaconf import DictConfig, OmegaConf

from harness.configure.compose import compose_stack
from harness.configure.overrides import STACK, is_stack_override, key_of, parsed, place_of, plain
from harness.configure.stack_labels import label
from harness.configure.stack_points import Point, points
from harness.configure.typed import TARGET, build, escaped
from harness.errors import UserError, require
from harness.files.digests import digest
from harness.stages.stack import Stack, unused

FULL = "full"


@dataclass(frozen=True)
class Arm:
    """One stack at one point, with its resolved configuration.

    failure: why none of its records can be made (one line, traceback), where its calibration failed. refusal: why it is not
    possible with this model, where calibration found that.
    """

    label: str
    point: dict[str, Any]
    config: dict[str, Any]
    stack: Stack
    spellings: tuple[str, ...] = ()  # what was asked for; several where it comes to the same
    failure: tuple[str, str] | None = None
    refusal: str | None = None

    @property
    def name(self) -> str:
        """Label and point, for messages."""
        return self.label + "".join(f" {k}={v}" for k, v in self.point.items())


def arms_of(cfg: DictConfig, overrides: Sequence[str]) -> list[Arm]:
    """All arms of a run, the full cache first and once.

    Args:
        cfg: the configuration, of which only `stacks` is read.
        overrides: what it was composed of; those of the stack are applied to every stack but what `stacks` says of one alone.

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
    changes = [o for o in overrides if is_stack_override(o) and key_of(o) != STACK]
    found = stack_arms(FULL, [])
    require(
        not found[0].stack.compresses, "conf/compress/full", found[0].config, "the full cache: every run is compared with it"
    )
    for member in [chosen] if chosen else stacks:
        name, own = _member(member)
        if name != FULL:
            found += stack_arms(name, [*own, *changes])
        elif own or changes:
            found += _changed_full(found[0].stack, [*own, *changes])
    return _once(found)


def stack_arms(name: str, changes: Sequence[str]) -> list[Arm]:
    """One stack at each of its points.

    Args:
        name: a member of conf/compress.
        changes: overrides of it, such as compress.keep.sinks=8 or codec@compress.keys=int4.

    Raises:
        UserError: as `arms_of`.
    """
    composed = compose_stack(name, changes)
    base = _checked(name, changes, composed[1])
    found = points(base, changes)
    called = label(name, changes, found, composed) if changes else name
    return [_used(_arm(base, name, called, point), [name, *changes]) for point in found]


def _chosen(overrides: Sequence[str]) -> str | None:
    """The name that `compress=` gives, its quotes read; None where there is no such override."""
    given = [o for o in overrides if key_of(o) == STACK]
    if not given:
        return None
    override = parsed(given[-1])  # of several the last one holds, as everywhere in Hydra
    name = plain(None if override.is_delete() else override.value())
    allowed = "the name of one stack; without it the stacks of the experiment run, stacks=null runs the full cache alone"
    require(isinstance(name, str) and bool(name), "compress", name, allowed)
    return str(name)


def _changed_full(full: Stack, changes: Sequence[str]) -> list[Arm]:
    """The full cache with other parts is a stack of its own; changes that leave it the full cache are refused."""
    found = stack_arms(FULL, changes)
    for arm in found:
        same = replace(arm.stack, phase=full.phase, chunk=full.chunk, every=full.every, read=full.read) == full
        if same:
            raise UserError(f"{' '.join(changes)} changes nothing of the full cache, which every run has: name another stack")
    return found


def _member(member: Any) -> tuple[str, list[str]]:
    """A member of `stacks`: a name, or a list of a name and the overrides of this stack alone."""
    name, *own = member if isinstance(member, list) and member else [member]
    known = isinstance(name, str) and all(isinstance(o, str) and is_stack_override(o) for o in own)
    allowed = "a name, or [NAME, compress.KEY=VALUE, group@compress.KEY=NAME, ...]"
    require(known and not any(key_of(o) == STACK for o in own), "stacks", member, allowed)
    return name, own


def _once(found: list[Arm]) -> list[Arm]:
    """Arms that differ in what they resolve to, each with all its spellings; two labels of one would be two points for one."""
    unique: dict[str, Arm] = {}
    for arm in found:
        first = unique.setdefault(digest(_plain_numbers(arm.config)), arm)
        spellings = tuple(dict.fromkeys((*first.spellings, *arm.spellings)))
        unique[digest(_plain_numbers(first.config))] = replace(first, spellings=spellings)
    return list(unique.values())


def _plain_numbers(value: Any) -> Any:
    """A configuration in which 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _used(arm: Arm, asked: Sequence[str]) -> Arm:
    """The arm with settings that its phase does not use at their defaults, and how it was asked for."""
    idle = {name: value for name, value in unused(arm.stack.keep, arm.stack.phase).items() if name in arm.config}
    point = (f"{key}={value}" for key, value in arm.point.items())
    config, stack = arm.config | idle, replace(arm.stack, **idle)
    return replace(arm, config=config, stack=stack, spellings=(" ".join([*asked, *point]),))


def _checked(name: str, changes: Sequence[str], resolved: dict[str, Any]) -> DictConfig:
    """A stack's resolved configuration; a change of its name, or one that it drops, is refused."""
    stack: DictConfig = OmegaConf.create(escaped(resolved))
    renamed = next((change for change in changes if key_of(change) == "compress.name"), None)
    require(renamed is None, "compress.name", renamed, "a changed stack is called by its changes, a YAML by its file")
    for change in changes:  # a part for a slot that the stack's own file empties again would be lost
        place = place_of(change)
        lost = place is not None and not change.startswith("~") and OmegaConf.select(stack, place) is None
        require(not lost, key_of(change), change.split("=", 1)[-1], f"stack {name!r} has no {place}: choose one that has")
    return stack


def _arm(base: DictConfig, name: str, called: str, point: Point) -> Arm:
    config = base.copy()
    for key, value in point.items():
        if OmegaConf.select(config, key, default=Ellipsis) is Ellipsis:
            raise UserError(
                f"stack {name!r}: point {key}={value!r} is not possible: {_keys_at(config, key)}, or set compress.points"
            )
        OmegaConf.update(config, key, escaped(value))
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    resolved = {k: v for k, v in resolved.items() if k not in ("name", "points")}
    where = f"stack {name!r}" + (f" at {point}" if point else "")
    stack = build(resolved, where)
    if not isinstance(stack, Stack):
        raise UserError(f"{where}: compress._target_={resolved[TARGET]!r} makes no harness.stages.stack.Stack")
    if stack.compresses and reads_full(called):  # a point may change the full cache too
        called = stack.describe()
    check_label(called, stack)
    return Arm(called, dict(point), resolved, stack)


def _keys_at(config: DictConfig, key: str) -> str:
    """What there is of a dotted key that is not there, and which keys that has."""
    parts = key.split(".")
    known = next(
        n for n in range(len(parts) - 1, -1, -1) if n == 0 or OmegaConf.select(config, ".".join(parts[:n])) is not None
    )
    place = ".".join(parts[:known])
    found = OmegaConf.select(config, place) if place else config
    keys = [str(one) for one in found if not str(one).startswith("_")] if OmegaConf.is_dict(found) else []
    return f"{place or 'the stack'} has {', '.join(keys) or 'no keys'}"


def reads_full(label: str) -> bool:
    """Whether a reader takes a label for that of the full cache, whatever its case, its marks and what is unseen in it."""
    return "".join(c for c in normalize("NFKC", label).casefold() if c.isalnum()) == FULL


def check_label(label: str, stack: Stack) -> None:
    """Only the full cache is called full (UserError)."""
    if stack.compresses and reads_full(label):
        raise UserError(f"a stack that compresses cannot be called {label!r}: give it another label, stacks={{'LABEL': stack}}")
