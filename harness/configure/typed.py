"""The one rule for configured values: each is of the type that its constructor's argument is annotated with.

Hydra hands over whatever YAML reads: 4.0 or true for a number of bits, 123 for a name. Every `_target_` tree is built here, a
class from outside the project too; what else a value must be is its class's own check.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from hydra.utils import instantiate

from harness.errors import UserError, require

MOST = 1 << 63  # whole numbers stay below: torch takes no more
TARGET = "_target_"
PLAIN: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    NoneType: ("null", lambda value: value is None),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", lambda value: type(value) in (int, float)),
    str: ("a text", lambda value: isinstance(value, str)),
}


def check_types(config: Any, path: str) -> None:
    """Refuse the first value of a `_target_` tree that is not of its argument's type, or that nothing takes.

    Numbers are finite, whole ones below 2^63; a `name` is not empty unless its class says so.

    Raises:
        UserError: `path.key=value` and what is allowed there.
    """
    if isinstance(config, float):
        require(math.isfinite(config), path, config, "a finite number")
    elif isinstance(config, int):
        require(abs(config) < MOST, path, config, "a whole number below 2^63")
    elif isinstance(config, Mapping):
        arguments = _arguments(config[TARGET]) if isinstance(config.get(TARGET), str) else {}
        if isinstance(config.get(TARGET), str):
            _check_keys(config, path)
        for key, value in config.items():
            here = f"{path}.{key}"
            if key in arguments:
                _check(value, *arguments[key], here)
            check_types(value, here)
    elif isinstance(config, list | tuple):
        for number, value in enumerate(config):
            check_types(value, f"{path}[{number}]")


def check_fields(value: Any, path: str) -> None:
    """The same rule for a part that exists as an object: refuse the first number, text or list that its field does not take."""
    if not is_dataclass(value) or isinstance(value, type):
        return
    arguments = _arguments_of(type(value))
    for one in fields(value):
        held, here = getattr(value, one.name), f"{path}.{one.name}"
        if isinstance(held, bool | int | float | str | list | tuple) and one.name in arguments:
            _check(held, *arguments[one.name], here)
            check_types(held, here)
        check_fields(held, here)


def made(config: Any, path: str) -> Any:
    """What a resolved `_target_` tree describes, every value checked; whatever Hydra or a constructor raises."""
    check_types(config, path)
    return instantiate(_in_pieces(config), _convert_="all")


def build(config: Any, where: str) -> Any:
    """What a resolved `_target_` tree describes; whatever is wrong with it becomes one UserError that starts with `where`.

    Args:
        config: its values are checked against the constructors' annotations first.
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
        line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise UserError(f"{where}: {line}") from error


def escaped(config: Any) -> Any:
    """A resolved configuration as OmegaConf takes it once more: a text that holds `${` stays that text."""
    return _texts(config, lambda text: re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text))


def joined(pieces: Sequence[str]) -> str:
    """The text that Hydra would have read as an interpolation (see `_in_pieces`)."""
    return "".join(pieces)


def _in_pieces(config: Any) -> Any:
    """Hydra resolves what it builds once more, at times twice: no text that it sees may hold `${`."""

    def cut(text: str) -> Any:
        first, *others = text.split("${")
        return {TARGET: f"{__name__}.joined", "pieces": [first, *(piece for one in others for piece in ("$", "{" + one))]}

    return _texts(config, lambda text: cut(text) if "${" in text else text)


def _texts(config: Any, change: Callable[[str], Any]) -> Any:
    """The same tree with every text changed."""
    if isinstance(config, str):
        return change(config)
    if isinstance(config, Mapping):
        return {key: _texts(value, change) for key, value in config.items()}
    return [_texts(value, change) for value in config] if isinstance(config, list | tuple) else config


def _arguments(target: str) -> dict[str, tuple[Any, Any]]:
    """(annotation, default) of what a class or function takes; none where Hydra will say that there is no such target.

    Annotations that cannot be resolved, because they name what is imported for type checkers alone, check nothing.
    """
    try:
        return _arguments_of(resolve_name(target))
    except Exception:
        return {}


def _check_keys(config: Mapping[str, Any], path: str) -> None:
    """Refuse a key that the target does not take, as one that another part had in its place, and a part that lacks one."""
    try:
        found = resolve_name(config[TARGET])
        parameters = inspect.signature(found).parameters
    except Exception:
        return  # Hydra will say that there is no such target
    kinds = {one.kind for one in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or any(key in config for key in ("_args_", "_partial_")):
        return
    hidden = {one.name for one in fields(found) if not one.repr} if is_dataclass(found) else set()
    takes = ", ".join(name for name in parameters if name not in hidden) or "no keys"
    called = getattr(found, "__name__", config[TARGET])
    for key, value in config.items():
        known = key in parameters or str(key).startswith("_")
        require(known, f"{path}.{key}", value, f"{called} takes {takes}; ~{path}.{key} takes it out")
    for name, one in parameters.items():
        needed = one.default is inspect.Parameter.empty and one.kind is not inspect.Parameter.VAR_POSITIONAL
        if needed and name not in config:
            raise UserError(f"{path}.{name} is missing: {called} takes {takes}")


def _arguments_of(found: Any) -> dict[str, tuple[Any, Any]]:
    """(annotation, default) of what a class or function takes; none where its annotations cannot be resolved."""
    try:
        plain = inspect.isclass(found) and not is_dataclass(found)  # a dataclass's fields are each resolved in their own module
        hints = get_type_hints(found.__init__ if plain else found)
        parameters = inspect.signature(found).parameters
    except Exception:
        return {}
    return {name: (hints[name], one.default) for name, one in parameters.items() if name in hints}


def _check(value: Any, hint: Any, default: Any, path: str) -> None:
    quoted = isinstance(value, bool | int | float) and not _fits(value, hint) and _fits("", hint)
    require(_fits(value, hint), path, value, words(hint) + (f"; as a text it is \"'{value}'\"" if quoted else ""))
    if path.endswith(".name") and isinstance(value, str) and default != "":
        require(bool(value.strip()), path, value, "a text that is not empty")


def words(hint: Any) -> str:
    """What an annotation allows, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint][0]
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(words, arguments)))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    kind = origin or hint
    if _is(kind, Mapping):
        return "a dictionary"
    if _is(kind, Sequence):
        items = [one for one in arguments if one is not Ellipsis]
        return "a list" + (f" (each {words(items[0])})" if items else "")
    return f"a part of its own, whose {TARGET} makes it: {getattr(kind, '__name__', kind)}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value, or a part that is still to be built, can be what an annotation says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint][1](value)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Annotated:
        return _fits(value, arguments[0])
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if isinstance(value, Mapping) and TARGET in value:
        return True
    return _fits_class(value, origin or hint, arguments)


def _fits_class(value: Any, kind: Any, arguments: Sequence[Any]) -> bool:
    if kind is Any or not inspect.isclass(kind):  # a type variable, a name for another type
        return True
    if _is(kind, Mapping) or is_typeddict(kind):
        return isinstance(value, Mapping) and (len(arguments) < 2 or all(_fits(one, arguments[1]) for one in value.values()))
    if _is(kind, Sequence) or _is(kind, set | frozenset):
        items = [one for one in arguments if one is not Ellipsis]
        return isinstance(value, list | tuple) and (len(items) != 1 or all(_fits(one, items[0]) for one in value))
    if _is(kind, os.PathLike | Enum):  # made of a text
        return isinstance(value, str | kind)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be asked: nothing that is written in a file is one
        return False


def _is(kind: Any, of: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, of)
