"""Reading and mending the shards of a run folder: bytes to records, the latest of each key. It knows no meaning of a score.

A shard is `records-<writer>.jsonl`, strict JSON, one record a line, written by one process only. A kill or a full disk can
cut its last line short; nothing else is ever half there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from harness.types import SCHEMAS_READ, Record, UserError

Json = dict[str, Any]

FINAL = ("ok", "refused", "not_exercised")  # what is not tried again
REMEDY = "delete that line, or move the file away; its records are then made again"
INFINITE = ("Infinity", "-Infinity")  # as strict JSON has them
NEEDED = {"schema"} | {one.name for one in fields(Record) if one.default is MISSING and one.default_factory is MISSING}
TASKS = ("example_id", "group_id", "length", "depth", "truncated", "order", "task", "metric", "query_aware")  # a user's words
KINDS = get_type_hints(Record) | dict.fromkeys(TASKS, str | float | bool | None)  # what readers may rely on


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The records of a run folder, the latest of each key, and what was passed over on the way."""

    records: list[Json]
    duplicates: int  # records whose key has another, later one
    half_written: int  # lines cut off by a kill, or damaged
    stand: frozenset[str] = frozenset()  # keys whose record is older than a failure to make it again

    def __iter__(self) -> Iterator[Json]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def shards(run_dir: Path) -> list[Path]:
    """The shards of a run folder, oldest first."""
    return sorted(run_dir.glob("records-*.jsonl"), key=lambda shard: (shard.stat().st_mtime_ns, shard.name))


def load_records(run_dir: Path) -> Loaded:
    """Read all shards of a run folder; of records with one key the latest wins, but no failure replaces a finished one.

    A line that a kill cut short is passed over and counted. Files that are not ours are refused in one line.

    Raises:
        UserError: no such folder, no shard in it, or a shard that no run wrote.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder: name a run folder such as results/<run_id>")
    found = shards(run_dir)
    if not found:
        raise UserError(f"{run_dir} holds no records: expected records-<writer>.jsonl in it")
    lines = [record for shard in found for record in parsed(content(shard), shard)]
    records = [record for record in lines if record is not None]
    kept = latest(records)
    finished = {record["key"]: str(record["written_at"]) for record in kept if record["status"] in FINAL}
    failed = (record for record in records if record["status"] not in FINAL and record["key"] in finished)
    return Loaded(
        records=kept,
        duplicates=len(records) - len(kept),
        half_written=len(lines) - len(records),
        stand=frozenset(one["key"] for one in failed if str(one["written_at"]) > finished[one["key"]]),
    )


def latest(records: Iterable[Json]) -> list[Json]:
    """One record a key, in the order they were written; equal times stay in the order given."""
    found: dict[str, Json] = {}
    for record in sorted(records, key=lambda one: str(one["written_at"])):
        old = found.get(record["key"])
        if old is not None and old.get("status") in FINAL and record.get("status") not in FINAL:
            continue
        found.pop(record["key"], None)  # the later record also takes the later place
        found[record["key"]] = record
    return list(found.values())


def content(shard: Path, start: int = 0) -> bytes:
    """The bytes of a shard from `start` on; UserError when it cannot be read."""
    try:
        with shard.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise UserError(f"{shard} cannot be read: {error.strerror}") from None


def parsed(data: bytes, shard: Path) -> Iterator[Json | None]:
    """A record for every line with something in it, None for one that is cut short or damaged."""
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            yield parse(line, f"{shard}:{number}")


def parse(line: bytes, where: str) -> Json | None:
    """The record of a line, None for one cut short; NaN of older files is read as missing."""
    try:
        record = json.loads(line, parse_constant=_constant)
    except (ValueError, RecursionError):
        if _was_ours(line):
            return None
        raise UserError(f"{where} is not a record: expected one JSON object a line; {REMEDY}") from None
    if not isinstance(record, dict) or not record.keys() >= {"key", "schema", "run_id"}:
        raise UserError(f"{where} is not a record of this program: key, schema or run_id is missing; {REMEDY}")
    if record["schema"] not in SCHEMAS_READ:
        reads = " and ".join(map(str, SCHEMAS_READ))
        raise UserError(f"{where} has schema={record['schema']!r}: this version reads {reads}")
    if lacks := sorted(NEEDED - record.keys()):
        raise UserError(f"{where} is not a whole record: {', '.join(lacks)} missing; {REMEDY}")
    whole = _defaults() | record
    for name, hint in KINDS.items():
        if not _fits(whole[name], hint) or (name in WORDS and not WORDS[name](whole[name])):
            raise UserError(f"{where} is damaged, {name}={_short(whole[name])} is not possible: {REMEDY}")
    return whole


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of a field's type; a number may be missing (a NaN) or infinite."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if hint == dict[str, float]:
        return isinstance(value, dict) and all(_fits(one, float) for one in value.values())
    if kind is float:
        return value is None or value in INFINITE or isinstance(value, int | float)
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _is_time(text: str) -> bool:
    try:
        return not text or bool(datetime.fromisoformat(text))  # schema 1 has none
    except ValueError:
        return False


WORDS: dict[str, Callable[[str], bool]] = {"status": (*FINAL, "failed").__contains__, "written_at": _is_time}


def mend(shard: Path) -> bool:
    """Make the last line of a shard whole: end it where only the line break is missing, cut it off where it is cut short.

    Only for a shard nobody writes to any more. Returns whether anything was lost.

    Raises:
        UserError: the file is not ours (it stays as it is), or cannot be changed.
    """
    data = content(shard)
    start = data.rfind(b"\n") + 1
    line = data[start:]
    if not line.strip():
        return False
    number = data.count(b"\n") + 1
    record = parse(line, f"{shard}:{number}")
    try:
        with shard.open("r+b") as file:
            if record is None:
                file.truncate(start)
            else:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{shard} cannot be mended: {error.strerror}") from None
    return record is None


def _was_ours(line: bytes) -> bool:
    """Whether a line that cannot be read began as a record, or is the zeros a machine leaves that lost its power."""
    return line.lstrip(b"\0 \t").startswith(b"{") or not line.strip(b"\0 \t\r")


def _defaults() -> Json:
    """Values of the fields that a record of an older schema may lack."""
    plain = {one.name: one.default for one in fields(Record) if one.default is not MISSING}
    return plain | {one.name: one.default_factory() for one in fields(Record) if one.default_factory is not MISSING}


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)
