"""Reading and locking of files in folders that others may have written: only plain files, no links.

A path on the command line may be a link; files inside a folder may not. Also: text from files made safe to print.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_SAID: set[str] = set()
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, halves of pairs, separators of lines and paragraphs
_JOINING = "\u200c\u200d"  # format characters that words of several scripts are written with


def kind(path: Path) -> str:
    """What is at a path, without following links: "" for nothing, "file", "a folder", "a link", "a pipe" ..."""
    try:
        mode = stat.S_IFMT(path.lstat().st_mode)
    except (OSError, ValueError):
        return ""
    return "file" if mode == stat.S_IFREG else _KINDS.get(mode, "a device")


def open_plain(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a plain file and return its descriptor; never blocks.

    Args:
        path: the file.
        flags: as for os.open.
        follow: allow a link to a plain file, for paths that the user typed.

    Raises:
        OSError: no such file, no access, or not a plain file (errno ELOOP, with the reason as text).
    """
    if not follow and kind(path) not in ("", "file"):
        raise OSError(errno.ELOOP, f"it is {kind(path)}, not a plain file", str(path))
    more = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags | more, 0o666)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.ELOOP, "it is not a plain file", str(path))
    return handle


def read_plain(path: Path, start: int = 0, *, follow: bool = False) -> bytes:
    """The bytes of a plain file from `start` on; OSError as `open_plain`."""
    with os.fdopen(open_plain(path, follow=follow), "rb") as file:
        file.seek(start)
        return file.read()


def read_text(path: Path, encoding: str = "utf-8", *, follow: bool = False) -> str:
    """The text of a plain file, with universal newlines; OSError as `open_plain`, or UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_plain(path, follow=follow)), encoding=encoding).read()


def lock(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file; returns a descriptor that holds the lock until it is closed, or None if another process has it.

    Raises:
        OSError: errno in LOCKLESS if the file system has no locks; otherwise the file cannot be created or is not plain.
    """
    while True:
        handle = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is(handle, path):
                return handle
        except (BlockingIOError, PermissionError):  # PermissionError: some file systems, for a taken lock
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last owner removed it meanwhile


@contextmanager
def alone(path: Path, what: str) -> Iterator[bool]:
    """Hold a lock, waiting if another process has it. Yields False if the file system has no locks (work may be done twice)."""
    try:
        handle = lock(path)
        if handle is None:
            print(f"{what}: another process is at it, waiting", file=sys.stderr)
            handle = lock(path, wait=True)
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
        handle = None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file, without writing; False if it cannot be determined."""
    try:
        handle = open_plain(path)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def printable(text: str) -> str:
    """The text on one line, with what steers a terminal or cannot be seen as escapes: control, direction, zero width."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _spelled(c) for c in text)


def _spelled(char: str) -> str:
    unseen = unicodedata.category(char) in _UNSEEN and char not in _JOINING
    return ascii(char)[1:-1] if unseen else char


def say_once(line: str) -> None:
    """Print a line on stderr, only the first time in this process."""
    if line not in _SAID:
        _SAID.add(line)
        print(printable(line), file=sys.stderr, flush=True)
