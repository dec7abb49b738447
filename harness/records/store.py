"""Records on disk: one shard per writer, one append per wave, strict JSON. It knows no meaning of a record but its key.

Reading and mending shards is `shards`, who works on what is `claims`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from harness.errors import UserError
from harness.files.plain_files import kind, open_plain, say_once
from harness.records import atomic
from harness.records.claims import Claims, is_name, own_folder
from harness.records.schema import FINAL, MOST_ATTEMPTS
from harness.records.shards import content, mend, parsed, read, shards
from harness.types import Record

WAIT = 0.5  # seconds between two looks at what other writers are busy with
TELL = 60.0  # seconds without news from others before a waiting writer says so
PATIENCE = 1800.0  # seconds without news from others before it makes their records itself
FOLDERS = ("manifests", "claims", "failures", "series")  # of a run folder, beside its records


class Keyed(Protocol):
    """A record to make; works with one claim are made by one writer."""

    @property
    def key(self) -> str: ...

    @property
    def claim(self) -> str: ...


Work = TypeVar("Work", bound=Keyed)


class Store(Generic[Work]):
    """The run folder of one writer among many; close it to let others have what it claimed.

    A record that is there with a final status is not made again, unless `redo`; failures are.
    """

    def __init__(self, folder: Path, *, redo: bool = False) -> None:
        self.folder, self.redo = folder, redo
        try:
            own_folder(folder)
            for name in FOLDERS:
                if name == "manifests" or kind(folder / name):
                    own_folder(folder / name)
        except OSError as error:
            raise UserError(f"results_dir: {folder} cannot be written: {error.strerror}") from None
        self.writer = f"{_host()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.shard = folder / f"records-{self.writer}.jsonl"
        self.claims = Claims(folder / "claims")
        self.asked: set[str] = set()
        self.done: set[str] = set()
        self.news: set[str] = set()  # keys of other writers' records that were not looked at yet
        self._attempts: Counter[str] = Counter()
        self._read: dict[Path, int] = {}
        self._open: dict[str, set[str]] = {}  # claim -> keys still to be written under it
        self._claim_of: dict[str, str] = {}
        self.claims.take(self.writer)
        self._mend()
        self._heard = False  # whether the last look found anything new
        self._first = True  # what is there before this writer's first look, `redo` makes again
        self.refresh()
        self._first = False

    def records(self) -> list[dict[str, Any]]:
        """Everything written so far, by all writers."""
        return read(self.folder).records

    def missing(self, works: Sequence[Work]) -> list[Work]:
        """Of the records asked for, those still to be made; what was asked for is remembered for the report."""
        self.asked |= {one.key for one in works}
        return [one for one in works if one.key not in self.done]

    @property
    def unmade(self) -> set[str]:
        """Keys asked for of which no record counts: what failed, with `redo` also where an older record stands."""
        return self.asked - self.done

    def rounds(self, works: Sequence[Work]) -> Iterator[Iterator[list[Work]]]:
        """Rounds over what is missing: in each, the works of every claim that no other writer holds.

        A round is to be read to its end and all of its records written before the next is asked for: a writer that waits
        for others holds nothing they could wait for.
        """
        groups: dict[str, list[Work]] = {}
        for one in self.missing(works):
            groups.setdefault(one.claim, []).append(one)
        left = list(groups.values())
        waited = 0.0
        while left:
            busy: list[list[Work]] = []
            yield self._free(left, busy, waited >= PATIENCE)
            waited = waited + WAIT if len(busy) == len(left) and not self._heard else 0.0
            if len(busy) == len(left):
                self._wait(waited, busy)
            left = busy

    def _wait(self, waited: float, busy: Sequence[Sequence[Work]]) -> None:
        """Sleep until the next look; whoever waits long says for what, and what will come of it."""
        if waited >= PATIENCE:
            say_once(f"{self.folder}: no news from other writers for {PATIENCE:g} s; their records are made here as well")
        elif waited >= TELL:
            count = sum(map(len, busy))
            say_once(
                f"{self.folder}: waiting for {count} records that other writers claimed, {PATIENCE:g} s without news at most"
            )
        time.sleep(WAIT)

    def _free(self, groups: Iterable[list[Work]], busy: list[list[Work]], force: bool) -> Iterator[list[Work]]:
        """Works of the claims that are free; with `force` of all: what another writer holds is then done twice."""
        self._heard = False
        self.refresh()
        for group in groups:
            if not self.missing(group):
                continue
            if not self.claims.take(group[0].claim) and not force:
                busy.append(group)
                continue
            self.refresh()  # what its last owner wrote before giving it up
            works = self.missing(group)
            self._open[group[0].claim] = {one.key for one in works}
            self._claim_of |= {one.key: one.claim for one in works}
            if works:
                yield works
            else:
                self._give_up(group[0].claim)

    def refresh(self) -> None:
        """Take in what other writers wrote since the last look, whole lines only."""
        for shard in shards(self.folder):
            start = self._read.get(shard, 0)
            if shard == self.shard or shard.lstat().st_size == start:
                continue
            data = content(shard, start)
            end = data.rfind(b"\n") + 1
            self._read[shard] = start + end
            self._heard |= end > 0
            for _, record in parsed(data[:end]):
                if isinstance(record, dict):
                    self._take_in(record)
                    self.news.add(record["key"])

    def _take_in(self, record: Mapping[str, Any]) -> None:
        key = record["key"]
        self._attempts[key] = max(self._attempts[key] + 1, record["attempt"])
        if record["status"] in FINAL and not (self.redo and self._first):
            self.done.add(key)

    def append(self, records: Iterable[Record]) -> None:
        """Write records in one append, flushed to disk: a kill loses none that were appended."""
        stamped = [
            dataclasses.asdict(r) | {"written_at": now(), "writer": self.writer, "attempt": self._next(r.key)} for r in records
        ]
        if not stamped:
            return
        lines = [json.dumps(_strict(one), allow_nan=False) + "\n" for one in stamped]
        try:
            handle = open_plain(self.shard, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab", buffering=0) as file:
                data = memoryview("".join(lines).encode())
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"results_dir: {self.shard} cannot be written: {error.strerror}; what is in it stays, "
                "and the same command makes the rest"
            ) from None
        for one in stamped:
            self._take_in(one)
            claim = self._claim_of.pop(one["key"], None)
            if claim is not None:
                self._open[claim].discard(one["key"])
                if not self._open[claim]:
                    self._give_up(claim)

    def _next(self, key: str) -> int:
        """Which try of this key a record would be, as far as is known here."""
        return min(self._attempts[key] + 1, MOST_ATTEMPTS)

    def _give_up(self, claim: str) -> None:
        del self._open[claim]
        self.claims.release(claim)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """One file per invocation."""
        stamp = str(manifest["time"]).replace(":", "").replace("+0000", "Z")
        text = json.dumps(_strict({"writer": self.writer, **manifest}), indent=1, allow_nan=False, default=str)
        self.write(Path("manifests") / f"{stamp}-{uuid.uuid4().hex[:6]}.json", lambda path: path.write_text(text, "utf-8"))

    def write(self, name: Path, fill: Any) -> None:
        """Let `fill(path)` make a file of the run folder, whole or not at all; UserError when it cannot be written."""
        try:
            own_folder((self.folder / name).parent)
        except OSError as error:
            raise UserError(f"{self.folder / name} cannot be written: {error.strerror}") from None
        atomic.replace(self.folder / name, fill)

    def close(self) -> None:
        """Give up all claims; whatever was not written is free for others."""
        self.claims.close()

    def _mend(self) -> None:
        """Mend what dead writers left; a shard whose writer lives is its own."""
        for shard in shards(self.folder):
            writer = shard.stem.removeprefix("records-")
            if is_name(writer) and self.claims.take(writer) and self.claims.locks:
                if mend(shard):
                    print(f"{shard}: its last line was cut short; that record is made again", file=sys.stderr)
                self.claims.release(writer)


def _host() -> str:
    """The machine's name as a part of file names."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname()).strip("-")[:60] or "host"


def now() -> str:
    """UTC to the microsecond; sorts as text."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: infinities become words, a NaN becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(v) for v in value]
    return value
