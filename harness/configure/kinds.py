"""Whether what a configuration names is of the kind that its place expects, a protocol's members told by name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TypeVar

from harness.errors import require

Kind = TypeVar("Kind")


def is_a(found: type, wanted: type) -> bool:
    """Whether a class is a `wanted`; of a protocol whose members are data, whether it has all of them."""
    if not getattr(wanted, "_is_protocol", False):
        return issubclass(found, wanted)
    members = {name for name in vars(wanted) if not name.startswith("_")}
    own = {one.name for one in fields(found)} if is_dataclass(found) else set()
    return wanted in found.__mro__ or all(name in own or hasattr(found, name) for name in members)


def of_kind(made: object, kind: type[Kind], key: str) -> Kind:
    """What a configuration made, as the kind that `key` expects (UserError where it is another)."""
    fits = isinstance(made, kind) if not getattr(kind, "_is_protocol", False) else is_a(type(made), kind)
    require(fits, f"{key}._target_", type(made).__qualname__, f"a {kind.__name__} is expected here")
    return made  # type: ignore[return-value]  # a protocol's members were told by name
