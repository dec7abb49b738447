"""Where conf/ is, paths as users write them, and names that become parts of paths: none leads out of its folder."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from harness.errors import UserError, require
from harness.files.plain_files import kind

CONF = Path(__file__).parents[2] / "conf"
MOST = 96  # bytes of a name: two of them and a digest stay below the 255 of a file system


def user_path(text: str) -> Path:
    """A path that a user wrote, with `~` expanded; UserError if that user is unknown."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text} names the home folder of a user that is not known here") from None


def page_path(key: str, text: str, beside: Collection[str] = ()) -> Path:
    """A file that a user named to be written, links followed.

    beside: endings of files that are written beside it under its name. UserError for a folder, a device, or one of those.
    """
    path = user_path(text)
    path = path.resolve() if path.is_symlink() else path
    require(bool(text) and kind(path) in ("", "file"), key, text, f"a file to write, not {kind(path) or 'nothing'}")
    require(path.suffix not in beside, key, text, f"a page, such as {path.stem}.html: {path.suffix} is written beside it")
    return path


def folder_name(label: str) -> str:
    """A label as part of a folder's name: letters, digits and ._+-, no dot or dash in front; empty where nothing is left."""
    text = re.sub(r"[^\w.+-]+", "_", label).lstrip(".-")
    return text.encode(errors="ignore")[:MOST].decode(errors="ignore")
