"""Writing records to a run folder that several writers share: one shard a writer, one append a batch, strict JSON.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from harness.errors import UserError
from harness.files.json_values import Config, Json
from harness.files.plain_files import kind, open_plain, say_once
from harness.records import atomic
from harness.records.claims import Claims, is_name, own_folder
from harness.records.following import Following
from harness.records.schema import FINAL, MOST_ATTEMPTS
from harness.records.shards import mend, read, shards
from harness.types import Record

WAIT = 0.5  # seconds between two looks at what other writers are busy with
TELL = 60.0  # seconds without anything new from others before a waiting writer says so
PATIENCE = 1800.0  # seconds without anything new from others before it makes their records itself
FOLDERS = ("manifests", "claims", "failures", "series")  # of a run folder, beside its records


class Keyed(Protocol):
    """A planned record; those with one claim are made by one writer."""

    @property
    def key(self) -> str: ...

    @property
    def claim(self) -> str: ...


Planned = TypeVar("Planned", bound=Keyed)


class Store(Generic[Planned]):
    """The run folder of one writer among many; close it to let others have what it claimed.

    A record that is there with a final status is not made again, unless `redo`; failures are.

    Attributes:
        done: keys that have a record which counts.
        others: keys of records that other writers wrote while this store was open, as far as it has looked.
    """

    def __init__(self, folder: Path, *, redo: bool = False) -> None:
        self.folder = folder
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
        self.done: set[str] = set()
        self.others: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._others, self._all = Following(folder), Following(folder)
        self._open: dict[str, set[str]] = {}  # claim -> keys still to be written under it
        self._claim_of: dict[str, str] = {}
        self._heard = False  # whether the last round's looks found anything new
        self.claims.take(self.writer)
        self._mend()
        for record in self._others.fresh(but=self.shard):
            self._count(record, final=not redo)

    def records(self) -> list[Json]:
        """Everything written so far, by all writers."""
        return read(self.folder).records

    def fresh(self) -> Iterator[Json]:
        """What was written, by any writer, since this was asked before; at first all of it, several records of a key too."""
        return self._all.fresh()

    def missing(self, planned: Sequence[Planned]) -> list[Planned]:
        """Those that have no record which counts."""
        return [one for one in planned if one.key not in self.done]

    def rounds(self, planned: Sequence[Planned]) -> Iterator[Iterator[list[Planned]]]:
        """Rounds over what is missing: in each, the planned records of every claim that no other writer holds.

        A round is to be read to its end and all of its records written before the next is asked for: a writer that waits
        for others holds nothing they could wait for.
        """
        groups: dict[str, list[Planned]] = {}
        for one in self.missing(planned):
            groups.setdefault(one.claim, []).append(one)
        left = list(groups.values())
        waited = 0.0
        while left:
            busy: list[list[Planned]] = []
            yield self._free(left, busy, waited >= PATIENCE)
            waited = waited + WAIT if len(busy) == len(left) and not self._heard else 0.0
            if len(busy) == len(left):
                self._wait(waited, busy)
            left = busy

    def _wait(self, waited: float, busy: Sequence[Sequence[Planned]]) -> None:
        """Sleep until the next look; whoever waits long says for what, and what will come of it."""
        if waited >= PATIENCE:
            say_once(f"{self.folder}: nothing new from other writers for {PATIENCE:g} s; their records are made here as well")
        elif waited >= TELL:
            count = sum(map(len, busy))
            say_once(f"{self.folder}: waiting for {count} records that other writers claimed, at most {PATIENCE:g} s")
        time.sleep(WAIT)

    def _free(self, groups: Iterable[list[Planned]], busy: list[list[Planned]], force: bool) -> Iterator[list[Planned]]:
        """Groups whose claim is free, the others go to `busy`; with `force` all: what another holds is then done twice."""
        self._heard = False
        self.refresh()
        for group in groups:
            if not self.missing(group):
                continue
            claim = group[0].claim
            if not self.claims.take(claim) and not force:
                busy.append(group)
                continue
            self.refresh()  # what its last owner wrote before releasing it
            left = self.missing(group)
            if left:
                self._open[claim] = {one.key for one in left}
                self._claim_of |= {one.key: claim for one in left}
                yield left
            else:
                self.claims.release(claim)

    def refresh(self) -> None:
        """Take in what other writers wrote since the last look."""
        for record in self._others.fresh(but=self.shard):
            self._heard = True
            self._count(record)
            self.others.add(record["key"])

    def _count(self, record: Config, *, final: bool = True) -> None:
        """Count a record as a try of its key and, where it may be final and is, the key as done."""
        key = record["key"]
        self._attempts[key] = max(self._attempts[key] + 1, record["attempt"])
        if final and record["status"] in FINAL:
            self.done.add(key)

    def append(self, records: Iterable[Record]) -> None:
        """Write records in one append, flushed to disk: a kill loses none that were appended."""
        stamp = {"written_at": now(), "writer": self.writer}
        stamped = [dataclasses.asdict(one) | stamp | {"attempt": self._next(one.key)} for one in records]
        if not stamped:
            return
        self._flush("".join(json.dumps(_strict(one), allow_nan=False) + "\n" for one in stamped).encode())
        for one in stamped:
            self._count(one)
            self._written(one["key"])

    def _flush(self, lines: bytes) -> None:
        try:
            handle = open_plain(self.shard, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab", buffering=0) as file:
                data = memoryview(lines)
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"results_dir: {self.shard} cannot be written: {error.strerror}; what is in it stays, "
                "and the same command makes the rest"
            ) from None

    def _written(self, key: str) -> None:
        """Release the key's claim with the last record under it."""
        claim = self._claim_of.pop(key, None)
        if claim is not None:
            self._open[claim].discard(key)
            if not self._open[claim]:
                del self._open[claim]
                self.claims.release(claim)

    def _next(self, key: str) -> int:
        """Which try of this key a record would be, as far as is known here."""
        return min(self._attempts[key] + 1, MOST_ATTEMPTS)

    def write_manifest(self, manifest: Config) -> None:
        """One file per invocation."""
        stamp = str(manifest["time"]).replace(":", "").replace("+0000", "Z")
        text = json.dumps(_strict({"writer": self.writer, **manifest}), indent=1, allow_nan=False, default=str)
        self.write(Path("manifests") / f"{stamp}-{uuid.uuid4().hex[:6]}.json", lambda path: path.write_text(text, "utf-8"))

    def write(self, name: Path, fill: Callable[[Path], object]) -> None:
        """Let `fill(path)` make a file of the run folder, whole or not at all; UserError when it cannot be written."""
        try:
            own_folder((self.folder / name).parent)
        except OSError as error:
            raise UserError(f"{self.folder / name} cannot be written: {error.strerror}") from None
        atomic.replace(self.folder / name, fill)

    def close(self) -> None:
        """Release all claims; whatever was not written is free for others."""
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


def _strict(value: object) -> object:
    """JSON has no NaN and no infinity: infinities become words, a NaN becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(v) for v in value]
    return value
