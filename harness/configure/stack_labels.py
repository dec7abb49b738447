"""What a stack is called: its YAML's name, then only what was changed, in words: `keydiff, always`; `sink_h2o, int4 keys`.

Every change shows, so two stacks have two labels; what a stack's points set, and what its phase does not use, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.configure.compose import compose_stack
from harness.configure.overrides import STACK, key_of, parsed, place_of, plain
from harness.configure.stack_points import Point
from harness.files.digests import digest
from harness.stages.stack import unused

ORDER = ("share", "keep", "merge", "keys", "values")  # of a label's words; then the rest by name
LONGEST = 40  # characters of a list; of a longer one its digest is shown
BOTH = "codec"  # what is the same for keys and values
Config = dict[str, Any]
GONE = object()  # the value of what was taken out


@dataclass(frozen=True)
class Change:
    """One thing that a stack has otherwise than its YAML.

    Attributes:
        place: where, dotted.
        value: what is there now; of a part its name in its group.
        part: whether a member of a group was put there.
    """

    place: str
    value: Any
    part: bool = False


def label(name: str, changes: Sequence[str], points: Sequence[Point], composed: tuple[Config, Config]) -> str:
    """The label of a member of conf/compress under changes; the name alone where they change nothing but points.

    Args:
        name: the member.
        changes: overrides of the stack, in any order.
        points: the stack's points, changes included.
        composed: the stack, changes included, as it is written and resolved.
    """
    silent = ("points", *(key for one in points for key in one))
    if all(any(_holds(one, key_of(change).removeprefix(f"{STACK}.")) for one in silent) for change in changes):
        return name  # nothing is composed to learn that
    parts = {str(place_of(one)): one for one in changes if place_of(one) is not None}  # the last one of a place holds
    chosen = [parts[place] for place in sorted(parts, key=lambda place: (place.count("."), _rank(place)))]
    stages = [compose_stack(name, chosen[:at])[0] for at in range(len(chosen) + 1)]
    found = [*_parts(chosen, stages), *_settings(stages[-1], *composed, points)]
    return ", ".join([name, *map(_words, _together(found))])


def _parts(chosen: Sequence[str], stages: Sequence[Config]) -> Iterator[Change]:
    """The chosen parts that are not what the stack has anyway; `stages`: the stack without any, with the first, and so on."""
    for override, before, after in zip(chosen, stages, stages[1:], strict=False):
        if before != after:
            found = parsed(override)
            yield Change(str(place_of(override)), GONE if found.is_delete() else plain(found.value()), part=True)


def _settings(base: Config, written: Config, resolved: Config, points: Sequence[Point]) -> Iterator[Change]:
    """Values that are not those of `base`, the stack with its chosen parts; interpolations are compared as written."""
    before, after, shown = _flat(base), _flat(written), _flat(resolved)
    ignored = (
        "name",
        "points",
        *unused(resolved.get("keep"), str(resolved.get("phase"))),
        *(key for one in points for key in one),
    )
    changed = {}
    for place in {**after, **before}:
        same = place in before and place in after and before[place] == after[place]
        replaced = place not in after and any(_holds(place, one) or _holds(one, place) for one in after)
        if not same and not replaced and not any(_holds(one, place) for one in ignored):
            changed[place] = shown.get(place, GONE)
    if changed.get("phase") == "every_n":  # its number says it
        del changed["phase"]
        changed["every"] = resolved["every"]
    yield from (Change(place, changed[place]) for place in sorted(changed, key=_rank))


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Dotted places and their values; a list is one value."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, one in value.items() for k, v in _flat(one, f"{place}.{key}" if place else str(key)).items()}
    return {place: value}


def _holds(outer: str, place: str) -> bool:
    return place == outer or place.startswith(f"{outer}.")


def _rank(place: str) -> tuple[int, str]:
    top = place.partition(".")[0]
    return ORDER.index(top) if top in ORDER else len(ORDER), place


def _together(found: Sequence[Change]) -> Iterator[Change]:
    """What is the same for keys and values is said once."""
    for change in found:
        role, dot, rest = change.place.partition(".")
        if role == "values" and replace(change, place=f"keys{dot}{rest}") in found:
            continue
        both = role == "keys" and replace(change, place=f"values{dot}{rest}") in found
        yield replace(change, place=f"{BOTH}{dot}{rest}") if both else change


SAID: Mapping[str, Callable[[str], str]] = {
    "phase": lambda value: value,
    "every": lambda value: "every token" if value == "1" else f"every {value} tokens",
    "chunk": lambda value: f"chunks of {value}",
    "positions": lambda value: f"{value} positions",
    "rope": lambda value: {"pre": "keys before RoPE", "post": "keys after RoPE"}.get(value, value),
    "read": lambda value: {"cached": "decoded copy", "every_step": "no decoded copy"}.get(value, value),
    "keep": lambda value: "nothing evicted" if value == "default" else f"keep {value}",
    "keep.sinks": lambda value: f"{value} sink{'' if value == '1' else 's'}",
    "keep.recent": lambda value: f"{value} recent",
    "keep.budget.unit": lambda value: f"budget in {value}",
}
OF_PART: Mapping[str, Callable[[str], str]] = {
    "share": lambda member: member,
    BOTH: lambda member: member,
    "keys": lambda member: f"{member} keys",
    "values": lambda member: f"{member} values",
    "merge": lambda member: f"{member} merging",
    "keep.layers": lambda member: f"{member} layers",
    "keep.heads": lambda member: f"{member} heads",
}


def _words(change: Change) -> str:
    """A change as a person would say it, or else its place and its value."""
    place = " ".join(dict.fromkeys(change.place.removeprefix("keep.").removeprefix("scorer.").split(".")))
    if change.value is GONE:
        return f"without {place}"
    say = (OF_PART if change.part else SAID).get(change.place)
    value = _spelled(change.value)
    return say(value) if say else f"{place} {value}"


def _spelled(value: Any) -> str:
    """A value in a label; 1.0 is 1, as for the stack itself."""
    if value is None or isinstance(value, bool):
        return {None: "default", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    return text if isinstance(value, str) or len(text) <= LONGEST else digest(value)[:8]
