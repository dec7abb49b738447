"""Finished records that cannot be made again: the older ones count, and whoever asked for new ones hears of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import hydra
import pytest

from harness import status
from harness.command import execute
from harness.records.shards import load_records
from harness.verify import verify
from tests.integration.commands.test_command import harness
from tests.support.running import CELL

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
CHEAP = [*CELL, "results_dir=results"]
RECORDS = 2 * 2
STAND = f"{RECORDS} could not be made again: the older records count"


def run(*more: str) -> tuple[Path, int]:
    overrides = [*CHEAP, "stacks=[int8]", *more]
    return execute(hydra.compose("config", overrides=overrides), overrides)


def test_what_cannot_be_made_again_is_a_failure_beside_the_older_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, failed = run()
    assert failed == 0
    before = {record["key"]: record for record in load_records(folder)}
    capsys.readouterr()

    again, failed = run("redo=true", "memory_limit=1")
    lines = capsys.readouterr().out.splitlines()
    assert (again, failed) == (folder, RECORDS)
    assert lines[-3] == f"{RECORDS} ok, 0 failed", "the table is of the older records"
    assert lines[-2].startswith(f"{STAND}; the last one: int8 {{}} ") and "memory_limit=1 is too small" in lines[-2]
    said, _, command = lines[-1].partition(": ")
    assert said == "the same command runs all again with"
    assert shlex.split(command)[3:] == [*CHEAP, "stacks=[int8]", "redo=true", "memory_limit=1"], "without redo nothing runs"
    assert {record["key"]: record for record in load_records(folder)} == before
    assert status.main([str(folder)]) == 0
    assert f"{RECORDS} ok, 0 refused, 0 failed, 0 missing; {STAND};" in capsys.readouterr().out

    out = harness("-m", *CHEAP, "compress=int8", "redo=true", "memory_limit=1", cwd=tmp_path)
    assert out.returncode == 1, out.stdout
    assert f"jobs: 0 ok, 1 failed; records: {RECORDS} ok" in out.stdout
    assert f"job 0 failed: {RECORDS} records failed, see {folder}" in out.stderr
    assert "redo=true" in out.stderr.splitlines()[-1]

    assert run("redo=true")[1] == 0
    assert "could not be made again" not in capsys.readouterr().out
    assert status.main([str(folder)]) == 0
    assert "could not be made again" not in capsys.readouterr().out, "a newer success ends it"


def test_no_limit_of_the_last_invocation_makes_records_differ_when_they_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = run()
    assert run("redo=true", "memory_limit=1", "time_limit=1e-9")[1] == RECORDS
    found = verify(folder)
    assert (found.checked, found.different) == (RECORDS, [])
    for manifest in (folder / "manifests").iterdir():
        told = json.loads(manifest.read_text())
        told["config"]["memory_limit"] = 1
        manifest.write_text(json.dumps(told))
    (line,) = verify(folder, 1).different
    assert "it could not be made again: MemoryError: memory_limit=1 is too small" in line and line.endswith(" bytes")
