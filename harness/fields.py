"""Fields of frozen dataclasses that are given in several spellings and read in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from typing import Any, TypeVar, cast

Value = TypeVar("Value")


def read_as(how: Callable[[Any, Any], Value], default: Value | Any = MISSING) -> Value:
    """A dataclass field that is read as `how(object, given)`, worked out once, when it is first read.

    A list of a YAML is read as a tuple, a name that nobody gave as one made of the other fields. Equality, hash and `replace`
    see what is read; `how` takes its own results as they are.

    Args:
        how: it may read the object's other fields.
        default: what is given where the constructor is not told; without one it must be.
    """
    return cast("Value", _ReadAs(how, default))  # as `dataclasses.field`: for a type checker the field is what is read


class _ReadAs:
    """The descriptor behind a field; Python's dataclasses hand it what the constructor is given."""

    def __init__(self, how: Callable[[Any, Any], Any], default: Any) -> None:
        self.how, self.default = how, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.given = name, f"{name} as given"

    def __set__(self, one: object, value: Any) -> None:
        one.__dict__[self.given] = value

    def __get__(self, one: object | None, owner: type | None = None) -> Any:
        if one is None:  # dataclasses ask the class for the default
            if self.default is MISSING:
                raise AttributeError(self.name)
            return self.default
        if self.name not in one.__dict__:
            one.__dict__[self.name] = self.how(one, one.__dict__[self.given])
        return one.__dict__[self.name]
