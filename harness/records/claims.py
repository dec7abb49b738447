"""Who makes what: a name in a run folder is claimed by one process at a time.

A claim is a file lock, which the operating system releases with its process: a dead writer's claims are free at once. Where
a file system has no locks, every claim is granted: records may then be made twice, and are the same.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError, require
from harness.files.plain_files import LOCKLESS, is_locked, kind, lock, say_once

FULL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class Claims:
    """The claims of one writer; `locks` is False once the file system turned out to have none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locks = True
        self._held: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Whether the name is this writer's now; never waits.

        Raises:
            UserError: the folder cannot be written, or the name is none.
        """
        require(is_name(name), "claim", name, "letters, digits, and . _ - between them")
        if name in self._held or not self.locks:
            return True
        try:
            own_folder(self.folder)
            handle = lock(self._file(name))
        except OSError as error:
            self._unlocked(name, error)
            return True
        if handle is None:
            return False
        self._held[name] = handle
        return True

    def _unlocked(self, name: str, error: OSError) -> None:
        """Say why a claim is granted without a lock; UserError where nothing can be written at all."""
        if error.errno in FULL:
            raise UserError(f"results_dir: {self.folder} cannot be written: {error.strerror}") from None
        if error.errno == errno.ELOOP:
            say_once(f"{self._file(name)}: {error.strerror}; it is left alone, and its work is not claimed")
            return
        self.locks = False
        reason = "the file system has no locks" if error.errno in LOCKLESS else str(error.strerror)
        say_once(f"{self.folder}: {reason}; work that several writers share may be done twice, the records are the same")

    def release(self, name: str) -> None:
        """Release a claim; its file goes with it."""
        handle = self._held.pop(name, None)
        if handle is not None:
            with suppress(OSError):
                self._file(name).unlink()  # while it is held: who opened it before sees that it is gone and opens anew
            os.close(handle)

    def close(self) -> None:
        """Release all claims, and clear away what dead writers left."""
        for name in list(self._held):
            self.release(name)
        if not self.locks or kind(self.folder) != "a folder":
            return
        for file in self.folder.glob("*.lock"):
            if is_name(file.stem) and kind(file) == "file":
                with suppress(UserError):
                    if self.take(file.stem):
                        self.release(file.stem)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.lock"


def is_name(text: object) -> bool:
    """Whether a text can be part of a file's name: never a path, never hidden."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text))


def own_folder(folder: Path) -> None:
    """Make a folder of a run where it is missing.

    Raises:
        UserError: there is a link or a file: nothing is written through it.
        OSError: it cannot be made.
    """
    found = kind(folder)
    if found not in ("", "a folder"):
        what = "a file" if found == "file" else found
        raise UserError(f"results_dir: {folder} is {what}, not a folder of this run: nothing is written there; move it away")
    folder.mkdir(parents=True, exist_ok=True)


def held(folder: Path, name: str) -> bool:
    """Whether some process holds a claim; False where that cannot be known, or the name is none."""
    return is_name(name) and kind(folder) == "a folder" and is_locked(folder / f"{name}.lock")
