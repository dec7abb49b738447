"""`python -m harness --help` is a page for people: every group and member is on it, folded to its width."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import usage
from harness.files.paths import CONF
from tests.support.record_factory import sweep, write_shard
from tests.support.started import started

ROOT = Path(__file__).parents[3]
SHARED = ("base",)  # what members are made of, nothing to choose


def test_every_group_and_every_member_is_named() -> None:
    lines = [line.strip() for line in usage.page().splitlines()]
    names = set(" ".join(lines).replace(",", "").split())
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))} - set(SHARED)
    assert groups == {*usage.CHOICES, *usage.PARTS}
    for group in (*groups, "hydra/launcher"):
        assert set(usage.members(group, [CONF])) <= names, group


def test_it_fits_its_width_and_says_what_this_is() -> None:
    lines = usage.page().splitlines()
    assert max(map(len, lines)) <= usage.WIDTH
    assert "KV cache" in lines[0] and sum(line.startswith("  python -m harness") for line in lines) >= 5
    for path in ("conf/README.md",):
        assert (ROOT / path).is_file() and any(line.split()[:1] == [path] for line in lines)


def test_members_of_an_own_folder_are_named_too(tmp_path: Path) -> None:
    (tmp_path / "compress").mkdir()
    (tmp_path / "compress" / "value_norm.yaml").touch()
    assert "value_norm" not in usage.page()
    for spelled in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        assert "value_norm" in usage.page(spelled)


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["task=stream", "--help"]])
def test_the_command_prints_it_and_runs_nothing(flags: list[str], tmp_path: Path) -> None:
    out = started("harness", flags, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert (out.returncode, out.stderr) == (0, "") and out.stdout == usage.page() + "\n"
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_read_enough_ends_it_silently(tmp_path: Path) -> None:
    gone, full = os.pipe()
    os.close(gone)
    python, env = [sys.executable, "-m", "harness", "--help"], {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(python, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    os.close(full)
    assert (out.returncode, out.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("command", ["plan", "recommend", "verify", "report", "status", "families", "speed"])
def test_every_command_that_prints_last_ends_with_its_reader(command: str) -> None:
    """Found by: `python -m harness.plan ... | head -1` ended in a traceback. The kind: each command says so where it starts."""
    file = ROOT / "harness" / (f"{command}.py" if command != "families" else "families/__main__.py")
    assert "end_with_reader()" in file.read_text(encoding="utf-8").split('if __name__ == "__main__":')[1]


def test_a_report_writes_its_page_before_it_prints(tmp_path: Path) -> None:
    """A reader that leaves at the first line takes nothing away but lines."""
    write_shard(tmp_path / "run", sweep(stacks=("full", "int8"), lengths=(1024,), depths=2, repeats=2))
    gone, full = os.pipe()
    os.close(gone)
    given = [sys.executable, "-m", "harness.report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
    env = {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(given, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    os.close(full)
    assert (out.returncode, out.stderr) == (-signal.SIGPIPE, "")
    assert (tmp_path / "page.html").is_file() and (tmp_path / "page.bib").is_file()
