"""How a point is called in tables, figures and messages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.analysis.point_measures import number

if TYPE_CHECKING:
    import pandas as pd

LOW_RANK = (".LowRank", ".XKV")  # classes whose codecs store fewer numbers, and these exactly unless `inner` says otherwise
SIDES = {"keys": "values", "values": "keys"}
BETWEEN = ", "  # the settings of a changed stack, after its name


class Budget(NamedTuple):
    """A budget as records have it; a word such as "full" is a unit without a value (NaN)."""

    value: float
    unit: str | None


def mode(row: Mapping[str, Any] | pd.Series[Any]) -> str:
    """Whether the question was seen when compressing, as tables and pages name it everywhere."""
    return "query-aware" if row["query_aware"] else "query-agnostic"


def budget_of(record: Mapping[str, Any]) -> Budget:
    """The budget that a record's point sets, else that of its stack."""
    keep = record["stack_config"].get("keep")
    stored = keep.get("budget") if isinstance(keep, Mapping) else None
    budget = dict(stored) if isinstance(stored, Mapping) else {"value": stored}
    for key, value in record["point"].items():
        if key.endswith(("budget.value", "budget.unit")):
            budget[key.rsplit(".", 1)[1]] = value
    value, unit = budget.get("value"), budget.get("unit")
    if isinstance(value, str):
        return Budget(number(None), value)
    known = isinstance(value, int | float) and isinstance(unit, str | None)  # a folder may hold anything under these names
    return Budget(number(value), unit) if known else Budget(number(None), None)


def label_of(record: Mapping[str, Any]) -> str:
    """The short name of a record's point: its stack and what the point sets, once where keys and values agree.

    `palu rank=0.3`, `kvquant keys bits=4, values bits=2`, `h2o 0.5, keys bits=4`.
    """
    unit = budget_of(record).unit
    point = {key: value for key, value in record["point"].items() if not key.endswith("budget.unit")}
    named, sided = list[str](), False
    for key, value in point.items():
        role, _, place = key.partition(".")
        twin = f"{SIDES[role]}.{place}" if role in SIDES else ""
        agree = twin in point and point[twin] == value
        if agree and role == "values":
            continue  # said with the keys
        sided |= role in SIDES and not agree
        named.append((f"{role} " if role in SIDES and not agree else "") + _setting(key, value, unit))
    return with_settings(str(record["stack"]), (BETWEEN if sided else " ").join(named))


def family_of(stack_config: Mapping[str, Any]) -> str:
    """What a stack does, in a few words: `eviction + quantization`; `full` where it does nothing."""
    parts = []
    if stack_config.get("keep") is not None:
        parts.append("eviction")
    parts += [name for name in ("merge", "share", "transform") if stack_config.get(name) is not None]
    codecs = [stack_config.get(role) for role in ("keys", "values")]
    ranked = [codec for codec in codecs if isinstance(codec, Mapping) and _target(codec).endswith(LOW_RANK)]
    coded = [codec for codec in codecs if codec not in ranked] + [codec.get("inner") for codec in ranked]
    parts += ["low rank"] if ranked else []
    parts += ["quantization"] if not all(map(_exact, coded)) else []
    return " + ".join(parts) or ("full" if stack_config.get("positions", "original") == "original" else "positions")


def bits_of(codec: object) -> int | None:
    """Bits that a codec of a configuration stores an element in, scales aside; None where that is not one number."""
    if not isinstance(codec, Mapping):
        return None
    if isinstance(codec.get("bits"), int):
        return int(codec["bits"])
    if codec.get("inner") is not None:
        return bits_of(codec["inner"])
    name = str(codec.get("_target_", "")).rsplit(".", 1)[-1]
    found = re.fullmatch(r"(?:Int|(?:Nv)?Float)(\d+)(?:Static)?", name)
    return 16 if _exact(codec) else int(found[1]) if found else None


def _exact(codec: object) -> bool:
    return codec is None or (isinstance(codec, Mapping) and _target(codec).endswith(".Exact"))


def _target(codec: Mapping[str, object]) -> str:
    return str(codec.get("_target_", ""))


def with_settings(stack: str, settings: str) -> str:
    """A stack's name and what a point of it sets: `h2o 0.5`, but `h2o, 8 sinks at 0.5`."""
    between = " at " if BETWEEN in stack else " "
    return stack + (between + settings if settings else "")


def _setting(key: str, value: object, unit: object) -> str:
    if key.endswith("budget.value") and isinstance(value, int | float):
        return f"{value:.4g}" if unit == "fraction" else f"{value:g} {unit or ''}".strip()
    return f"{key.removesuffix('.value').rsplit('.', 1)[-1]}={value}"


def shortened(stacks: Iterable[str]) -> dict[str, str]:
    """Each stack by what tells it from the others of its name: a setting that all of them have is left out.

    `keydiff, recent 0` and `keydiff, recent 0, always` become `keydiff` and `keydiff, always`.
    """
    siblings: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for stack in stacks:
        name, *settings = stack.split(BETWEEN)
        siblings[name][stack] = settings
    found: dict[str, str] = {}
    for name, members in siblings.items():
        common = set.intersection(*map(set, members.values())) if len(members) > 1 else set()
        short = {stack: BETWEEN.join([name, *(s for s in own if s not in common)]) for stack, own in members.items()}
        found |= short if len(set(short.values())) == len(short) else {stack: stack for stack in members}
    return found
