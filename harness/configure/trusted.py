"""Builds what a run folder names, a model, a task, a corpus, a stack, without letting the folder choose what runs.

A folder may be anybody's. Of every `_target_` in it the object it resolves to is checked: a class that this project, or a
module that the user allows, defines itself, of the type that its field expects. Other modules are not
even imported. Values are taken as they are: no interpolation, no resolver, none of Hydra's own keys.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from harness.configure.kinds import is_a
from harness.configure.typed import check_types
from harness.engine.batches import one_line
from harness.errors import UserError
from harness.models.load import ModelSpec
from harness.stages.stack import Stack
from harness.types import Corpus, Task

Build = Callable[[Mapping[str, Any], str], Any]

SLOTS: dict[str, Any] = {"model": ModelSpec, "task": Task, "corpus": Corpus, "stack": Stack}
OURS = ("harness.stages", "harness.models", "tasks")
TARGET = "_target_"


@dataclass(frozen=True)
class Builder:
    """Builds values of a folder's configuration; `allow` are modules of the user's own, and settings that let code run."""

    allow: frozenset[str] = frozenset()

    def __call__(self, config: Any, where: str) -> Any:
        """The value that `config` describes.

        Args:
            config: plain data with `_target_`s.
            where: its slot as its first word: model, task, corpus or stack.

        Raises:
            UserError: a target that no folder may name, a field that its class lacks, or what the class itself refuses.
        """
        made = self._made(config, SLOTS[where.split()[0]], where)
        check_types(config, where)  # it imports what targets name: only now are all of them known to be ours
        return made

    def _made(self, value: Any, hint: Any, where: str) -> Any:
        if isinstance(value, list):
            return [self._made(one, hint, f"{where}[{at}]") for at, one in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if TARGET not in value:
            return {key: self._made(one, hint, f"{where}.{key}") for key, one in value.items()}
        cls = self._class(value[TARGET], hint, where)
        hints = _hints(cls, where)
        given = {key: one for key, one in value.items() if key != TARGET}
        self._check_fields(cls, given, where)
        made = {key: self._made(one, hints[key], f"{where}.{key}") for key, one in given.items()}
        try:
            return cls(**made)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except Exception as error:  # whatever a class says to values that it was not made for
            raise UserError(f"{where}: {one_line(error)}") from error

    def _class(self, target: Any, hint: Any, where: str) -> type:
        """The class a target names, once it is known to be one that may be used here."""
        named = f"{where}._target_={target!r:.80} is not possible"
        module, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
        if not self._knows(module):
            raise UserError(f"{named}: a run folder names parts of this project; --allow MODULE admits a module of your own")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except Exception as error:
            raise UserError(f"{named}: {module} cannot be imported ({one_line(error)})") from None
        if not isinstance(found, type) or not self._knows(found.__module__) or _at_home(found) is not found:
            raise UserError(f"{named}: it is no class that {module} defines")
        if not any(is_a(found, wanted) for wanted in _classes(hint)):
            wanted = " or ".join(one.__name__ for one in _classes(hint)) or "plain values"
            raise UserError(f"{named}: {wanted} is expected here")
        return found

    def _knows(self, module: str) -> bool:
        return any(module == one or module.startswith(f"{one}.") for one in (*OURS, *self.allow))

    def _check_fields(self, cls: type, given: Mapping[str, Any], where: str) -> None:
        known = {one.name for one in fields(cls) if one.init} if is_dataclass(cls) else set()
        for key, value in given.items():
            if key not in known:
                raise UserError(f"{where}.{key} is not possible: {cls.__name__} has {', '.join(sorted(known)) or 'no fields'}")
            if key in getattr(cls, "runs_code", ()) and value and f"{where}.{key}" not in self.allow:
                raise UserError(
                    f"{where}.{key}={value!r:.80} could run code, so no run folder may say it: --allow {where}.{key}"
                )


def check_rest(config: Mapping[str, Any], known: Collection[str] = ("model", "task", "corpus", "compress", "stacks")) -> None:
    """Refuse a target where a configuration has plain values (UserError)."""
    for key, value in config.items():
        if key not in known and any(True for _ in _targets(value)):
            raise UserError(f"{key} names a part, where the configuration of a run has plain values")


def _targets(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if TARGET in value:
            yield value[TARGET]
        for one in value.values():
            yield from _targets(one)
    elif isinstance(value, list):
        for one in value:
            yield from _targets(one)


def _at_home(found: type) -> Any:
    """What is found under a class's own name in its own module."""
    place: Any = sys.modules.get(found.__module__)
    for name in found.__qualname__.split("."):
        place = getattr(place, name, None)
    return place


def _hints(cls: type, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except Exception as error:
        raise UserError(f"{where}: the types of {cls.__name__}'s fields cannot be read ({one_line(error)})") from None


def _classes(hint: Any) -> list[type]:
    """The classes of this project, or of a module of the user's, that a type names."""
    if isinstance(hint, type) and hint.__module__ not in ("builtins", "typing", "collections.abc"):
        return [hint]
    return [one for inner in get_args(hint) for one in _classes(inner)]
