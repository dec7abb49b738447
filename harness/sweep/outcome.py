"""How a job of a sweep went, as files in its own folder: what counts, whatever the launcher hands back or loses.

Whoever runs a job writes them, whoever sweeps reads them; nothing heavy is imported.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "KV_HARNESS_JOB"  # names the folder of its job to a process that runs one job of a sweep
_STARTED, _OUTCOME = "started.json", "outcome.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: ok | failed (it came to its end, with failed records or a refusal) | crashed (it was cut off).
        reason: one line, empty when ok.
        seconds: wall time.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0


class Refused(int):
    """How many records were refused, in a run that could make none of what was asked for and had no failure."""


def start(folder: Path) -> None:
    """Leave a mark that the job began."""
    _write(folder / _STARTED, {"time": time.time(), "host": os.uname().nodename, "pid": os.getpid()})


def has_started(folder: Path) -> bool:
    """Whether anybody began the job."""
    return (folder / _STARTED).exists()


def end(folder: Path, outcome: Outcome) -> None:
    """Leave word of the job's end."""
    _write(folder / _OUTCOME, asdict(outcome))


def read(folder: Path) -> Outcome | None:
    """How the job went; None while there is no word of its end."""
    try:
        return Outcome(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:6]}")
    draft.write_text(json.dumps(value), encoding="utf-8")
    draft.replace(path)
