"""What a record and a manifest are when they are read back: one typed schema, checked value by value. It reads no file.

Numbers are finite and fit 64 bits, counts are not negative, times are UTC, names are never paths. A number that may be
missing may also be infinite, which strict JSON has as a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from datetime import datetime
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, AllowInfNan, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict

from harness.files.json_values import Json
from harness.records.claims import is_name
from harness.types import SCHEMAS_READ, Record

FINAL = ("ok", "refused", "not_exercised")  # what is not tried again
MOST = (1 << 63) - 1
MOST_ATTEMPTS = 1_000_000
TASKS = ("example_id", "group_id", "length", "depth", "truncated", "order", "task", "metric", "query_aware")  # a user's words
_DEEP = 40  # brackets within brackets; ours have 6
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?\+00:00")


def _is_time(text: str) -> str:
    if not _UTC.fullmatch(text):
        raise ValueError("expected UTC, as in 2026-01-31T12:00:00+00:00")
    datetime.fromisoformat(text)
    return text


def _is_writer(text: str) -> str:
    if text and not is_name(text):
        raise ValueError("expected a name")
    return text


Text = Annotated[str, Strict()]
Whole = Annotated[int, Strict(), Field(ge=-MOST, le=MOST)]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Infinite = Annotated[float, Strict()]  # a NaN was read as missing
Measured = Infinite | Literal["Infinity", "-Infinity"] | None
Time = Annotated[Text, AfterValidator(_is_time)]
Writer = Annotated[Text, AfterValidator(_is_writer)]
Series = Annotated[str, Strict(), StringConstraints(pattern=r"^series/[A-Za-z0-9_-]+\.parquet$")]
Parts = dict[Text, dict[Text, Count]]
_PLAIN: dict[object, object] = {int: Count, float: Number, str: Text, bool: Annotated[bool, Strict()], type(None): None}
_OWN: dict[str, object] = {
    **dict.fromkeys(TASKS, Text | Whole | Measured | bool),
    "schema": Literal[SCHEMAS_READ],
    "seed": Whole,
    "score": Measured | bool,
    "status": Literal[(*FINAL, "failed")],
    "aggregate": Literal["mean", "exp_weighted"],
    "weight": Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)],
    "tokens_kept": Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)],
    "bytes": Parts,
    "series_path": Series | None,
    "written_at": Literal[""] | Time,  # schema 1 has none
    "writer": Writer,
    "attempt": Annotated[int, Strict(), Field(ge=1, le=MOST_ATTEMPTS)],
}


def _typed(hint: object) -> object:
    """The strict form of a field's type."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return reduce(or_, (Measured if one is float else _typed(one) for one in inner))  # type: ignore[arg-type]
    if kind is dict:
        return dict[Text, Measured if inner[1] is float else _typed(inner[1])]  # type: ignore[misc]
    if kind is list:
        return list[_typed(inner[0])]  # type: ignore[misc]
    return hint


def _of_record() -> TypeAdapter[Json]:
    hints = get_type_hints(Record)
    typed = {name: _OWN.get(name) or _typed(hint) for name, hint in hints.items()}
    return TypeAdapter(TypedDict("Fields", {k: Required[v] for k, v in typed.items()}, total=False))  # type: ignore[misc, operator]


class Asked(TypedDict, total=False):
    """What an invocation asked for, as `recorder.asked` wrote it; arms were called cells once."""

    arms: list[tuple[Text, Text]]
    cells: list[tuple[Text, Text]]
    examples: Required[list[tuple[Whole, Text | Whole | Number | None, Text]]]


class Manifest(TypedDict, total=False):
    """What an invocation was; what is named here can be relied on."""

    time: Required[Time]
    config: Required[Json]
    writer: Writer
    asked: Asked


_RECORD, _MANIFEST = _of_record(), TypeAdapter(Manifest)
CONFIGURED = {"model", "task", "seed", "limit", "memory_limit", "results_dir"}


_VALUES = {one.name: one.default for one in fields(Record) if one.default is not MISSING}
_MADE = [(one.name, one.default_factory) for one in fields(Record) if one.default_factory is not MISSING]


def defaults() -> Json:
    """Values of the fields that a record of an older schema may lack."""
    return _VALUES | {name: make() for name, make in _MADE}


def record_fault(record: Json, line: bytes) -> str:
    """Why a JSON value is no record that can be read, "" where it is one; `record` has its defaults, `line` is its text."""
    try:
        _RECORD.validate_python(record)
    except ValidationError as error:
        return _said(error, record)
    return _odd(record, line)


def manifest_fault(manifest: object, text: bytes) -> str:
    """Why a JSON value is no manifest that can be read, "" where it is one."""
    if not isinstance(manifest, dict):
        return "it is no object"
    try:
        _MANIFEST.validate_python(manifest)
    except ValidationError as error:
        return _said(error, manifest)
    if lacks := sorted(CONFIGURED - manifest["config"].keys()):
        return f"config lacks {', '.join(lacks)}"
    return _odd(manifest, text)


def _said(error: ValidationError, value: Json) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    return f"{name}={_short(value[name])} is not possible" if name in value else f"{name} is missing"


def _odd(value: object, text: bytes) -> str:
    """What no field's type forbids and no reader survives: numbers beyond 64 bits, half characters, endless nesting."""
    if re.search(rb"\d{19}", text) and any(isinstance(one, int) and abs(one) > MOST for one in _leaves(value)):
        return "a number in it does not fit 64 bits"
    if b"\\u" in text and any(isinstance(one, str) and _broken(one) for one in _leaves(value)):
        return "a text in it holds half a character"
    if text.count(b"[") + text.count(b"{") > _DEEP and _depth(value) > _DEEP:
        return "it is nested too deep"
    return ""


def _leaves(value: object) -> Iterable[object]:
    """Everything in a JSON value that is no container, names included."""
    left: list[object] = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
        else:
            yield one


def _depth(value: object) -> int:
    deep, level = 0, list[object]([value])
    while level:
        deep += 1
        level = [x for one in level if isinstance(one, dict | list) for x in (one.values() if isinstance(one, dict) else one)]
    return deep


def _broken(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
