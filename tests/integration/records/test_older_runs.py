"""Runs of older versions (tests/golden/runs, made by them with a tiny random model) are read, and verify and resume say so.

The kind: a record that the program once wrote and cannot read any more, or reads by importing what the record names.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from harness import report, status, verify
from harness.analysis.points import points
from harness.records.shards import load_records
from harness.types import SCHEMA, SCHEMAS_READ
from tests.support.running import run

RUNS = Path(__file__).parents[2] / "golden" / "runs"
OLDER = SCHEMAS_READ[:-1]
RECORDS = {1: 4, 2: 6}
ARMS = {1: ["full", "int8"], 2: ["full", "int8", "streaming keep.budget.value=0.5"]}


@pytest.fixture
def copied(tmp_path: Path, schema: int) -> Path:
    return Path(shutil.copytree(RUNS / f"schema{schema}", tmp_path / "run"))


def test_the_runs_are_of_the_schemas_before_this_one() -> None:
    assert SCHEMA == SCHEMAS_READ[-1] == max(SCHEMAS_READ)
    assert {path.name for path in RUNS.iterdir()} == {f"schema{schema}" for schema in OLDER}
    for schema in OLDER:
        lines = [line for shard in (RUNS / f"schema{schema}").glob("*.jsonl") for line in shard.read_text().splitlines()]
        assert {json.loads(line)["schema"] for line in lines} == {schema} and len(lines) == RECORDS[schema]


@pytest.mark.parametrize("schema", OLDER)
def test_report_reads_it(copied: Path, schema: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    assert report.main([str(copied), "--out", str(copied / "page.html")]) == 0
    told = capsys.readouterr()
    assert told.err == "" and " int8 " in told.out
    assert not {name for name in set(sys.modules) - before if name.startswith(("harness.lm", "harness.stages", "tasks"))}
    table = points(load_records(copied))
    assert table["n"].tolist() == [2] * len(ARMS[schema])
    int8 = table.set_index("stack").loc["int8"]
    assert int8["ratio"] == pytest.approx(0.516, abs=0.001) and int8["tokens_kept"] == int8["tokens_seen"]


@pytest.mark.parametrize("schema", OLDER)
def test_status_counts_its_records(copied: Path, schema: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(copied)]) == 0
    told = capsys.readouterr().out
    assert f"{RECORDS[schema]} ok, 0 refused, 0 failed, 0 missing; nobody at work" in told
    assert all(f" {arm} " in told for arm in ARMS[schema])


@pytest.mark.parametrize("schema", OLDER)
def test_verify_says_in_one_line_that_another_version_made_it(
    copied: Path, schema: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([str(copied)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {copied} was made by another version (of the code, a library or the model), and cannot")
    assert "_target_='harness." in line
    assert "harness.lm" not in sys.modules


def test_resume_says_in_one_line_that_another_version_made_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command after a change of code: what is there is not taken for what was asked for."""
    asked = ("model=tiny_llama", "stacks=[int8]", "task.lengths=[200]", "limit=1")
    first = run(tmp_path, *asked)
    assert "another version" not in capsys.readouterr().out
    run(tmp_path, *asked)
    assert "another version" not in capsys.readouterr().out, "nothing changed"
    monkeypatch.setattr("harness.records.keys.LIBRARIES", ("torch",))
    both = run(tmp_path, *asked)
    lines = [line for line in capsys.readouterr().out.splitlines() if "another version" in line]
    assert lines == [
        "2 record(s) of this run were made by another version (of the code, a library or the model): they stay, and are "
        "made again here"
    ]
    assert len(both) == 2 * len(first) == 4
