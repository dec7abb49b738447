"""Records on disk: one shard per writer, one append per wave, strict JSON. It knows no meaning of a record but its key.

Reading shards is `points.load_records`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from harness.run.points import load_records
from harness.types import Record, UserError


class Keyed(Protocol):
    """A record to make."""

    @property
    def key(self) -> str: ...


Work = TypeVar("Work", bound=Keyed)
DONE = ("ok", "refused", "not_exercised")


class Store:
    """The run folder of one writer. A record that is there with a final status is never made again; failures are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / "manifests").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"results_dir: {folder} cannot be written: {error.strerror}") from None
        self.shard = folder / f"records-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}.jsonl"
        self.asked: set[str] = set()
        self.done = {r["key"] for r in self.records() if r["status"] in DONE}

    def records(self) -> list[dict[str, Any]]:
        """Everything written so far, by all writers."""
        return load_records(self.folder).records if any(self.folder.glob("records-*.jsonl")) else []

    def missing(self, work: Sequence[Work]) -> list[Work]:
        """Of the records asked for, those still to be made; what was asked for is remembered for the report."""
        self.asked |= {one.key for one in work}
        return [one for one in work if one.key not in self.done]

    def append(self, records: Iterable[Record]) -> None:
        """Write records in one append, flushed to disk: a kill loses none that were appended."""
        lines = [json.dumps(_strict(dataclasses.asdict(r)), allow_nan=False) + "\n" for r in records]
        try:
            with self.shard.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"results_dir: {self.shard} cannot be written: {error.strerror}") from None

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """One file per invocation."""
        stamp = str(manifest["time"]).replace(":", "").replace("+0000", "Z")
        path = self.folder / "manifests" / f"{stamp}-{uuid.uuid4().hex[:6]}.json"
        path.write_text(json.dumps(_strict(manifest), indent=1, allow_nan=False, default=str), encoding="utf-8")


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: infinities become words, a NaN becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(v) for v in value]
    return value
