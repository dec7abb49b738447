"""Stacks and tasks that exist as objects, such as one made in a notebook cell: what they are as configurations, and as arms.

A record's key holds the configuration, so it must say all that the object is: its class, its fields, and, where no module
file holds the class, the digest of its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any

import torch

from harness.configure.arms import Arm, check_label
from harness.configure.object_source import in_a_file, source_digest
from harness.configure.typed import TARGET, check_fields
from harness.errors import require
from harness.files.digests import digest
from harness.stages.stack import Stack, unused

SOURCE = "_source_"  # beside _target_: the digest of the source of a class that no module file holds
_PLAIN = "a number, a text, a list, a dictionary, a tensor, or an object whose own fields are such values"


def described(value: Any, path: str) -> Any:
    """A value as plain data; an object as its class (`_target_`) and its fields.

    Args:
        value: what stands in a stack or a task.
        path: where it stands, for messages.

    Raises:
        UserError: something that cannot be told apart from another value of its kind, or a class without source.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(one, f"{path}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one, f"{path}[{at}]") for at, one in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((described(one, path) for one in value), key=repr)
    return _object(value, path)


def _object(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        content = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return {"tensor": content, "shape": list(data.shape), "dtype": str(data.dtype)}
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, partial):
        return {"partial": described([value.func, value.args, value.keywords], path)}
    if isinstance(value, type) or _is_function(value):
        return _named(value)
    return _named(type(value)) | _fields(value, path)


def _named(found: Any) -> dict[str, str]:
    """The dotted name of a class or function, and its source where no file holds it."""
    named = {TARGET: f"{found.__module__}.{found.__qualname__}"}
    return named if in_a_file(found) else named | {SOURCE: source_digest(found)}


def _is_function(value: Any) -> bool:
    return callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__code__")


def _fields(value: Any, path: str) -> dict[str, Any]:
    if is_dataclass(value):
        return {one.name: described(getattr(value, one.name), f"{path}.{one.name}") for one in fields(value) if one.init}
    require(hasattr(value, "__dict__"), path, value, _PLAIN)
    computed = {name for cls in type(value).__mro__ for name, one in vars(cls).items() if isinstance(one, cached_property)}
    return {name: described(one, f"{path}.{name}") for name, one in vars(value).items() if name not in computed}


Asked = str | Stack | Sequence[Any]  # a name, a value, or a name with overrides of its own


def divided(stacks: Any) -> tuple[list[Any], list[tuple[str | None, Stack]]]:
    """(what is asked for by name, the values with the labels they are given).

    Args:
        stacks: names, `Stack` values and lists [NAME, OVERRIDE, ...]; or a dictionary from a label to one value or several.
    """
    if isinstance(stacks, str | Stack):
        stacks = [stacks]
    if isinstance(stacks, Mapping):
        several = {label: [one] if isinstance(one, Stack) else one for label, one in stacks.items()}
        given = [(label, one) for label, group in several.items() for one in group]
        fits = all(isinstance(label, str) and label and isinstance(one, Stack) for label, one in given)
        require(fits, "stacks", stacks, "a dictionary goes from labels to Stack values, or to lists of them")
        return [], given
    fits = isinstance(stacks, Sequence) and bool(stacks) and all(isinstance(one, str | Stack | list | tuple) for one in stacks)
    require(fits, "stacks", stacks, "names of conf/compress, Stack values, or lists [NAME, OVERRIDE, ...]")
    return [one for one in stacks if not isinstance(one, Stack)], [(None, one) for one in stacks if isinstance(one, Stack)]


def with_values(found: Sequence[Arm], values: Sequence[tuple[str | None, Stack]]) -> list[Arm]:
    """The arms of a configuration, and those that exist as values alone; what comes to the same is one, with all its names."""
    arms = {digest(arm.config): arm for arm in found}
    named = {arm.label for arm in found}
    for label, stack in values:
        require(label not in named, "stacks", label, "a label of your own, which no stack asked for by name has")
        if stack.compresses:  # the full cache is there in every run
            arm = arm_of(stack, label)
            first = arms.setdefault(digest(arm.config), arm)
            names = tuple(dict.fromkeys((*first.spellings, *arm.spellings)))
            arms[digest(arm.config)] = replace(first, spellings=names)
    return list(arms.values())


def arm_of(stack: Stack, label: str | None = None) -> Arm:
    """A stack that exists as a value, its budget as its point."""
    stack = replace(stack, **unused(stack.keep, stack.phase))
    check_fields(stack, "compress")
    label = label or stack.describe()
    check_label(label, stack)
    point = {} if stack.keep is None else {"keep.budget.value": stack.keep.budget.value}
    return Arm(label, point, described(stack, f"stack {label!r}"), stack, spellings=(label,))
