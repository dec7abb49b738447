"""Type checks of task settings that Hydra leaves to us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.errors import UserError, require, valid


def whole(value: object, least: int) -> bool:
    """Whether a setting is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def share(value: object) -> bool:
    """Whether a setting is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def above_0(value: object) -> bool:
    """Whether a setting is a whole number above 0."""
    return whole(value, 1)


def all_different(values: object, fits: Callable[[object], bool]) -> bool:
    """Whether a setting is a list of different values, at least one, that fit."""
    items = listed(values)
    return bool(items) and all(map(fits, items)) and len(set(items)) == len(items)


def as_tuple(task: object, value: Any) -> Any:
    """How a list setting is read (`harness.fields`): a list as a tuple, so that a task has a hash; checks come later."""
    return tuple(value) if isinstance(value, list) else value


def listed(value: object) -> tuple[object, ...]:
    """The items of a list setting; empty for anything that is not a list."""
    return tuple(value) if isinstance(value, list | tuple) else ()


def require_bools(task: object, *keys: str) -> None:
    """UserError unless these settings of a task are true or false."""
    for key in keys:
        value = getattr(task, key)
        require(isinstance(value, bool), f"task.{key}", value, "true or false")


def require_valid(value: object, where: str) -> None:
    """UserError, naming `where`, for a text or list of texts with half of a surrogate pair (JSON allows it)."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and not valid(text):
            raise UserError(f"{where} holds half of a surrogate pair, which is no character: {text!r:.60}")


def require_text(task: object, key: str, *marks: str) -> str:
    """A setting of a task that must be a text containing these marks, else UserError."""
    text = getattr(task, key)
    allowed = f"a text that holds {' and '.join(marks)}" if marks else "a text"
    require(isinstance(text, str) and all(mark in text for mark in marks), f"task.{key}", text, allowed)
    require_valid(text, f"task.{key}")
    return str(text)


def stop_strings(task: object, stop: object) -> tuple[str, ...]:
    """How stop strings are read (`harness.fields`): one text or a list of texts, none empty.

    Raises:
        UserError: any other value.
    """
    items = (stop,) if isinstance(stop, str) else stop
    texts = tuple(item for item in listed(items) if isinstance(item, str) and item)
    fits = isinstance(items, list | tuple) and len(texts) == len(items)
    require(fits, "task.stop", stop, "a text or a list of texts, none empty")
    require_valid(texts, "task.stop")
    return texts
