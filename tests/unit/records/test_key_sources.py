"""A record's key holds the code of all that decides the record, and of nothing else."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from harness.records import keys

ROOT = Path(__file__).parents[3]
MAKES_RECORDS = ("harness.evaluation.assemble",)  # what a run, a lost job and verify start from
# Read by what makes records, and unable to change one: how they get to disk, and keys themselves.
ON_DISK = ("store", "shards", "schema", "claims", "atomic", "keys", "failures", "following")
DECIDES_NOTHING = {f"harness.records.{name}" for name in ON_DISK}
ROOMS = ("files", "stages", "kv", "models", "engine", "configure", "calibrate", "lm_eval", "evaluation")
FOLDERS = sorted({path.parent for name in ROOMS for path in (ROOT / "harness" / name).rglob("*.py")})
DECIDING = [
    *(ROOT / f"harness/{name}.py" for name in ("types", "errors")),
    *(next(path for path in sorted(folder.glob("*.py")) if path.stat().st_size) for folder in FOLDERS),
    ROOT / "tasks/scoring.py",
]
OTHERS = [
    next(str(path.relative_to(ROOT)) for path in sorted((ROOT / "harness" / name).glob("*.py")) if path.stat().st_size)
    for name in ("records", "analysis", "pages", "sweep")
]


def hashed(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    keys._hash_files.cache_clear()
    monkeypatch.setattr(keys, "PACKAGE", root / "harness")
    return keys.code_hash({})


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code")
    for name in ("harness", "tasks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_byte_of_what_decides_a_record_changes_its_key(path: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind: stop rule, seeds, choices and recorder changed, and older records stood."""
    before = hashed(copied, monkeypatch)
    file = copied / path.relative_to(ROOT)
    content = file.read_bytes()
    file.write_bytes(content + b"#")
    assert hashed(copied, monkeypatch) != before
    file.write_bytes(content)
    assert hashed(copied, monkeypatch) == before
    keys._hash_files.cache_clear()


@pytest.mark.parametrize("name", [*OTHERS, "harness/status.py", "harness/verify.py"])
def test_reports_and_launchers_are_in_no_key(name: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hashed(copied, monkeypatch)
    (copied / name).write_text((copied / name).read_text() + "#")
    assert hashed(copied, monkeypatch) == before
    keys._hash_files.cache_clear()


def test_every_module_that_makes_records_is_in_the_key_or_said_to_decide_nothing() -> None:
    """A module that joins them is found here, whatever folder it stands in."""
    sources = [keys.PACKAGE / name for name in keys.KEY_SOURCES]
    seen: set[str] = set()
    todo = [*MAKES_RECORDS]
    while todo:
        name = todo.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ours = {name for name in seen if name.startswith("harness.")}
    in_key = {name for name in ours if any((ROOT / f"{name.replace('.', '/')}.py").is_relative_to(one) for one in sources)}
    assert ours - in_key == DECIDES_NOTHING
