"""Where conf/ is, paths as users write them, and names that become parts of paths: none leads out of its folder."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import UserError

CONF = Path(__file__).parents[2] / "conf"
MOST = 96  # bytes of a name: two of them and a digest stay below the 255 of a file system


def user_path(text: str) -> Path:
    """A path that a user wrote, with `~` expanded; UserError if that user is unknown."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text} names the home folder of a user that is not known here") from None


def folder_name(label: str) -> str:
    """A label as part of a folder's name: letters, digits and ._+-, no dot or dash in front; empty where nothing is left."""
    text = re.sub(r"[^\w.+-]+", "_", label).lstrip(".-")
    return text.encode(errors="ignore")[:MOST].decode(errors="ignore")
