"""Who works on what: a name in a run folder is claimed by one process at a time. It knows no record.

A claim is a file lock, which the operating system gives up with its process: a dead writer's claims are free at once. Where
a file system has no locks, every claim is granted: work may then be done twice, and the records are the same.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from harness.types import UserError

FULL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


class Claims:
    """The claims of one writer; `locks` is False once the file system turned out to have none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locks = True
        self._held: dict[str, FileLock] = {}

    def take(self, name: str) -> bool:
        """Whether the name is this writer's now; never waits.

        Raises:
            UserError: the folder cannot be written.
        """
        if name in self._held or not self.locks:
            return True
        try:
            self.folder.mkdir(exist_ok=True)
            lock = FileLock(self._file(name))
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            if error.errno in FULL:
                raise UserError(f"results_dir: {self.folder} cannot be written: {error.strerror}") from None
            self.locks = False
            return True
        self._held[name] = lock
        return True

    def release(self, name: str) -> None:
        """Give a claim up; its file goes with it."""
        lock = self._held.pop(name, None)
        if lock is not None:
            with suppress(OSError):
                self._file(name).unlink()  # while it is held: who opened it before sees that it is gone and opens anew
            lock.release()

    def close(self) -> None:
        """Give all claims up, and clear away what dead writers left."""
        for name in list(self._held):
            self.release(name)
        for file in self.folder.glob("*.lock"):
            with suppress(UserError):
                if self.locks and self.take(file.stem):
                    self.release(file.stem)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.lock"


def held(folder: Path, name: str) -> bool:
    """Whether some process holds a claim; False where that cannot be told."""
    file = folder / f"{name}.lock"
    if not name or not file.exists():
        return False
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False
