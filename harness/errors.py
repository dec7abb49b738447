"""The one way to refuse what a user asked for: a line that names the key, the value and what is allowed."""

from __future__ import annotations


class UserError(ValueError):
    """A request that cannot be run: one line that names the key, the value and what is allowed."""


class UnfitStackError(UserError):
    """A stack that this model does not allow: its own records are refused, and no other's."""


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """Refuse a configuration value in one line; the only way the project validates input."""
    if not ok:
        raise UserError(f"{key}={value!r} is not possible: {allowed}")


def valid(text: str) -> bool:
    """Whether a text can be written as UTF-8: half of a surrogate pair, as JSON may spell one, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
