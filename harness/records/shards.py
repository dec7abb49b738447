"""Reading and mending the shards of a run folder: bytes to records, the one that counts of each key.

A shard is `records-<writer>.jsonl`, strict JSON, one record a line, written by one process only. A kill or a full disk can
cut its last line short; nothing else is ever half there. What does not fit is named on stderr and passed over.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError
from harness.files.json_values import Json
from harness.files.plain_files import kind, open_plain, read_plain, say_once
from harness.records.schema import FINAL, defaults, record_fault
from harness.types import SCHEMAS_READ

CUT = "cut short"  # of a line that a kill, a full disk or a power cut left
HELD = 10_000  # different parts of records that are held once; of more each record has its own
SHOWN = 3  # lines of a shard that are named one by one
Standing = tuple[bool, int, str]
_BEGINS = b'{"key": "'  # every line of ours


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The records of a run folder, one of each key, and what was passed over on the way."""

    records: list[Json]
    duplicates: int  # records whose key has another one that counts
    half_written: int  # lines cut off by a kill, or damaged
    redo_failed: frozenset[str] = frozenset()  # keys of finished records that a later try could not make again
    tries: Mapping[str, int] = field(default_factory=dict)  # of every key, how many records of it are known
    unfit: tuple[str, ...] = ()  # lines that are no record of ours: FILE:LINE and the reason

    def __iter__(self) -> Iterator[Json]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def shards(run_dir: Path) -> list[Path]:
    """The shards of a run folder, oldest first; what has such a name and is no plain file is named and left alone."""
    found = []
    for path in run_dir.glob("records-*.jsonl"):
        what = kind(path)
        if what == "file":
            found.append((path.lstat().st_mtime_ns, path.name, path))
        elif what:
            say_once(f"{path} is {what}, not a shard: it is left alone")
    return [path for *_, path in sorted(found)]


def load_records(run_dir: Path) -> Loaded:
    """As `read`, for a folder that must hold records.

    Raises:
        UserError: no such folder, no shard in it, or nothing in its shards that is ours.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder: name a run folder such as results/<run_id>")
    if not shards(run_dir):
        raise UserError(f"{run_dir} holds no records: expected records-<writer>.jsonl in it")
    loaded = _read(run_dir)
    if loaded.unfit and not loaded.records:
        raise UserError(f"{run_dir} holds no records: {loaded.unfit[0]}")
    _say(loaded)
    return loaded


def read(run_dir: Path) -> Loaded:
    """All shards of a run folder, none in the worst case; `latest` says which record of a key counts.

    A line that a kill cut short is counted; a line that is no record of ours is named on stderr. Both are passed over.

    Raises:
        UserError: a shard that may not be read.
    """
    loaded = _read(run_dir)
    _say(loaded)
    return loaded


def _read(run_dir: Path) -> Loaded:
    records: list[Json] = []
    held: dict[str, object] = {}
    half, unfit = 0, []
    for shard in shards(run_dir):
        for number, found in parsed(lines(shard)):
            if isinstance(found, dict):
                records.append(_sharing(found, held))
            elif found == CUT:
                half += 1
            else:
                unfit.append(f"{shard}:{number} {found}")
    kept = latest(records)
    finished = {record["key"]: standing(record)[1:] for record in kept if record["status"] in FINAL}
    failed = (record for record in records if record["status"] not in FINAL and record["key"] in finished)
    return Loaded(
        records=kept,
        duplicates=len(records) - len(kept),
        half_written=half,
        redo_failed=frozenset(one["key"] for one in failed if standing(one)[1:] > finished[one["key"]]),
        tries=_tries(records),
        unfit=tuple(unfit),
    )


def _say(loaded: Loaded) -> None:
    """Name what was passed over; of many lines of one file the first ones, and how many more."""
    by_file: dict[str, list[str]] = {}
    for line in loaded.unfit:
        by_file.setdefault(line.split(".jsonl:")[0], []).append(line)
    for file, lines in by_file.items():
        for line in lines[:SHOWN]:
            say_once(f"{line}; passed over")
        if len(lines) > SHOWN:
            say_once(f"{file}.jsonl: {len(lines) - SHOWN} more lines passed over")


def latest(records: Iterable[Json]) -> list[Json]:
    """One record a key, in the order they were written: a finished one before a failure, then the later try.

    A try is known by its number, which counts the tries before it; clocks decide only between tries of one number.
    """
    found: dict[str, Json] = {}
    for record in sorted(records, key=standing):
        found[record["key"]] = record
    return sorted(found.values(), key=lambda one: str(one["written_at"]))


def _tries(records: Iterable[Json]) -> Counter[str]:
    tries: Counter[str] = Counter()
    for record in records:
        tries[record["key"]] = max(tries[record["key"]] + 1, record["attempt"])
    return tries


def standing(record: Json) -> Standing:
    """Of two records of a key the one of the higher standing counts (see `latest`)."""
    return record.get("status") in FINAL, record.get("attempt", 1), str(record["written_at"])


def content(shard: Path, start: int = 0) -> bytes:
    """The bytes of a shard from `start` on; UserError when it cannot be read."""
    try:
        return read_plain(shard, start)
    except OSError as error:
        raise UserError(f"{shard} cannot be read: {error.strerror}") from None


def lines(shard: Path) -> Iterator[bytes]:
    """The lines of a shard, one after another: a large one is never in memory as a whole. UserError as `content`."""
    try:
        with os.fdopen(open_plain(shard), "rb") as file:
            yield from (line.rstrip(b"\n") for line in file)
    except OSError as error:
        raise UserError(f"{shard} cannot be read: {error.strerror}") from None


def _sharing(record: Json, held: dict[str, object]) -> Json:
    """The record, its words and parts held once for all records that have them: most are the same for an arm or an example.

    Who reads records changes nothing in them.
    """
    for name, value in record.items():
        if isinstance(value, str):
            record[name] = sys.intern(value)
        elif isinstance(value, dict | list):
            text = repr(value)
            record[name] = held.setdefault(text, value) if len(held) < HELD else held.get(text, value)
    return record


def parsed(data: Iterable[bytes]) -> Iterator[tuple[int, Json | str]]:
    """(number, record) for every line with something in it; a text, CUT or what is wrong, for one that is no record."""
    for number, line in enumerate(data, start=1):
        if line.strip():
            yield number, parse(line)


def parse(line: bytes) -> Json | str:
    """The record of a line, or why it is none; NaN of older files is read as missing."""
    try:
        record = _DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return CUT if _was_ours(line) else "is not a record: expected one JSON object a line"
    if not isinstance(record, dict) or not record.keys() >= {"key", "schema", "run_id"}:
        return "is not a record of this program: key, schema or run_id is missing"
    if record["schema"] not in SCHEMAS_READ:
        return f"has schema={record['schema']!s:.20}: this version reads {', '.join(map(str, SCHEMAS_READ))}"
    whole = defaults() | record
    fault = record_fault(whole, line)
    return f"is no whole record: {fault}" if fault else whole


def mend(shard: Path) -> bool:
    """Make the last line of a shard whole: end it where only the line break is missing, cut it off where it is cut short.

    Only for a shard nobody writes to any more. A file that does not begin like one of ours, or that several folders
    hold (a hard link), stays as it is. Returns whether anything was lost.

    Raises:
        UserError: the file cannot be changed.
    """
    data = content(shard)
    start = data.rfind(b"\n") + 1
    line = data[start:]
    found = parse(line) if line.strip() else ""
    ours = isinstance(parse(data.split(b"\n", 1)[0]), dict) if start else line.startswith(_BEGINS)
    if not ours or not (found == CUT or isinstance(found, dict)) or shard.lstat().st_nlink > 1:
        return False
    try:
        with os.fdopen(open_plain(shard, os.O_RDWR), "r+b") as file:
            if found == CUT:
                file.truncate(start)
            else:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{shard} cannot be mended: {error.strerror}") from None
    return found == CUT


def _was_ours(line: bytes) -> bool:
    """Whether a line that cannot be read began as a record, or is the zeros a machine leaves that lost its power."""
    return line.lstrip(b"\0 \t").startswith(b"{") or not line.strip(b"\0 \t\r")


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)


_DECODER = json.JSONDecoder(parse_constant=_constant)
