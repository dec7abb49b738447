"""What a Hydra override says, from its text alone: its key, its value, whether it is about the stack."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from harness.errors import UserError, require

STACK = "compress"
NO_OVERRIDE = "is not understood: it takes KEY=VALUE, every bracket closed, odd characters in quotes"


def parsed(text: str) -> Override:
    """The override that a text is (UserError where it is none)."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise UserError(f"{text} {NO_OVERRIDE}") from None


def key_of(override: str) -> str:
    """The key of a Hydra override."""
    return override.split("=", 1)[0].lstrip("+~")


def own_keys(overrides: Sequence[str], keys: Collection[str], read: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(a command's own keys, with the override of each; the overrides that are left).

    read: top-level keys of a run that the command reads.

    Raises:
        UserError: a key given twice, or one of a run that nothing would come of here.
    """
    own: dict[str, str] = {}
    rest = []
    for text in overrides:
        key = key_of(text)
        if key in keys:
            require(key not in own, key, text.partition("=")[2], "given twice")
            own[key] = text
            continue
        if re.split(r"[.@/=]", key.rpartition("@")[2])[0] not in read:
            raise UserError(f"{text} is not possible: this command reads {', '.join(keys)}, and of a run {', '.join(read)}")
        rest.append(text)
    return own, rest


def is_stack_override(override: str) -> bool:
    """Whether an override changes the stack: compress=, compress.x=, group@compress.x=."""
    key = key_of(override)
    return key == STACK or key.startswith(f"{STACK}.") or f"@{STACK}." in key


def place_of(override: str) -> str | None:
    """Where in the stack a member of a group is put: `keep.layers` of layers@compress.keep.layers=pyramid; None of a value."""
    _, at, place = key_of(override).partition(f"@{STACK}.")
    return place if at else None


def plain(value: Any) -> Any:
    """A parsed value without its quotes."""
    return getattr(value, "text", value)


def single(text: str, several: str = "one value is asked for here") -> Any:
    """The one value of an override without its quotes; UserError where it is a sweep, or none."""
    override = parsed(text)
    if override.is_sweep_override():
        raise UserError(f"{text} is not possible: {several}")
    return plain(override.value())


def values(override: str) -> Iterator[tuple[str, Any]]:
    """(dotted key inside the stack, value) of all that a change of values sets; nothing of a chosen part or a removal."""
    found = parsed(override)
    if place_of(override) is None and not found.is_delete():
        yield from _leaves(key_of(override).removeprefix(f"{STACK}."), found.value())


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(f"{key}.{plain(name)}", one)
    else:
        yield key, value
