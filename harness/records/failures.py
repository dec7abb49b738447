"""Where a failure's traceback is kept in a run folder, and how a record's one line names it."""

from __future__ import annotations

import re
from pathlib import Path

_NAMED = re.compile(r" \(failures/[^()]*\)$")


def trace_file(key: str) -> Path:
    """The file of a record's key, relative to the run folder."""
    return Path("failures") / f"{key[:16]}.txt"


def naming(line: str, file: Path) -> str:
    """The reason, and where more of it is."""
    return f"{line} ({file})"


def bare(error: str) -> str:
    """The reason alone: many records may share it, while every traceback is a file of its own."""
    return _NAMED.sub("", error)
