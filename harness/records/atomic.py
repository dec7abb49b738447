"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.errors import UserError


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file beside `path`, then rename it there; nothing is left behind on failure.

    Raises:
        UserError: the folder cannot be written or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
        os.close(handle)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    draft = Path(name)
    try:
        write(draft)
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
