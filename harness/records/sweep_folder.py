"""What the folder of a sweep says of its runs: which ones, and where they are now.

The summary names runs as the sweep was asked to, mostly relative to where it was started; who reads it may be elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from harness.errors import UserError, valid
from harness.files.plain_files import kind, read_plain

SUMMARY = "sweep.json"


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep which came to its end."""
    return kind(folder / SUMMARY) == "file"


def runs(folder: Path) -> list[Path]:
    """The run folders of a sweep, each once, as its jobs named them; one that is nowhere stays as it was named.

    Raises:
        UserError: the summary cannot be read, or is not ours.
    """
    summary = folder / SUMMARY
    try:
        rows = json.loads(read_plain(summary))
        named = [(_path(row.get("cwd", "")), _path(row["run"])) for row in rows]
    except OSError as error:
        raise UserError(f"{summary} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{summary} is not the summary of a sweep: name its run folders instead") from None
    return list(dict.fromkeys(_found(Path(run), folder, cwd) for cwd, run in named))


def _path(text: object) -> str:
    """A text that a file system may have as a path; ValueError for any other value."""
    if not isinstance(text, str) or "\0" in text or not valid(text):
        raise ValueError(text)
    return text


def _found(run: Path, folder: Path, cwd: str) -> Path:
    """The run where the sweep was started, else (it was moved or copied) above the sweep's folder, else from here."""
    here = Path.cwd()
    found = next((base / run for base in _bases(folder, cwd, here) if (base / run).is_dir()), run)
    return found.relative_to(here) if found.is_relative_to(here) else found


def _bases(folder: Path, cwd: str, here: Path) -> Iterator[Path]:
    if cwd:
        yield Path(cwd)
    yield from folder.resolve().parents
    yield here
