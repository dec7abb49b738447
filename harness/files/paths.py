"""Where conf/ is, paths as users write them, and names that become parts of paths: none leads out of its folder."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import UserError, require

CONF = Path(__file__).parents[2] / "conf"
MOST = 96  # bytes of a name: two of them and a digest stay below the 255 of a file system
NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


def user_path(text: str) -> Path:
    """A path as a user writes it, `~` being the home folder (UserError where there is no such user)."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text} names the home folder of a user that is not known here") from None


def folder_name(label: str) -> str:
    """A label as part of a folder's name: letters, digits and ._+-, no dot or dash in front; empty where nothing is left."""
    text = re.sub(r"[^\w.+-]+", "_", label).lstrip(".-")
    return text.encode(errors="ignore")[:MOST].decode(errors="ignore")


def require_names(**names: str) -> None:
    """Refuse names of packages, versions or digests that would lead out of the cache, or are more than a name to pip."""
    for key, name in names.items():
        fits = re.fullmatch(NAME, name) is not None
        require(fits, key, name, "letters, digits and . _ + -, a letter or a digit in front")
