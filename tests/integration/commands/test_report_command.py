"""The report command and the derived files of a run folder, as a user meets them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from harness.errors import UserError
from harness.pages.outputs import write_all
from tests.support.record_factory import make, sweep, write_shard
from tests.support.started import started
from tests.support.stream_factory import stream

ROOT = Path(__file__).parents[3]
FEW = ("full", "int8", "h2o")


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    return started("harness.report", list(map(str, arguments)), ROOT, env)


def test_runs_are_merged_into_one_table_and_one_page(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", sweep(stacks=FEW, repeats=1))
    write_shard(tmp_path / "b", sweep(stacks=FEW, repeats=1, query_aware=True))
    copied = write_shard(tmp_path / "c", sweep(stacks=["int8"], repeats=1))
    with copied.open("a") as file:
        file.write('{"key": "cut')
    out = tmp_path / "deep" / "page.html"
    done = report(tmp_path / "a", tmp_path / "b", tmp_path / "c", "--out", out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == str(out)
    assert "1 half-written record(s) passed over" in done.stdout
    assert "10 earlier record(s) with the key of a later one" in done.stdout
    assert sum("query-agnostic" in line for line in lines) == sum("query-aware" in line for line in lines) == 1
    assert sum(line.startswith(" int8 ") for line in lines) == 2
    assert "smollm2-needle-aa1b2c3d" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["missing", "empty", "foreign"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    if kind != "missing":
        folder.mkdir()
    if kind == "foreign":
        (folder / "records-x.jsonl").write_text("model,score\n")
    done = report(folder, "--out", tmp_path / "page.html")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and str(folder) in line
    assert not (tmp_path / "page.html").exists()


def test_derived_files_are_made_from_the_shards_and_agree(tmp_path: Path) -> None:
    write_shard(tmp_path, sweep(stacks=FEW, repeats=1))
    (tmp_path / "manifests").mkdir()
    for day, version in ((1, "9.8.7-old"), (2, "9.8.8-new")):
        config = dict.fromkeys(("model", "task", "seed", "limit", "memory_limit", "results_dir"))
        told = {"time": f"2026-01-0{day}T00:00:00+00:00", "config": config, "versions": {"torch": version}}
        (tmp_path / "manifests" / f"2026010{day}T000000Z.json").write_text(json.dumps(told))
    (tmp_path / "manifests" / "20260103T000000Z.json").write_text("{}")
    ranked = write_all(tmp_path, None).points
    wanted = {"points.csv", "points.parquet", "frontier.json", "dashboard.html", "manifests", "records-main.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == wanted
    parquet, csv = pd.read_parquet(tmp_path / "points.parquet"), pd.read_csv(tmp_path / "points.csv")
    pd.testing.assert_frame_equal(parquet, ranked)
    assert csv["score"].tolist() == pytest.approx(ranked["score"].tolist())
    (group,) = json.loads((tmp_path / "frontier.json").read_text())["groups"]
    assert {entry["label"] for entry in group["frontier"]} == set(ranked.loc[ranked["on_frontier"], "label"])
    page = (tmp_path / "dashboard.html").read_text(encoding="utf-8")
    assert "9.8.8-new" in page and "9.8.7-old" not in page
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    write_all(tmp_path, None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == first


def test_a_writing_problem_leaves_the_records_and_no_half_file(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make()])
    before = shard.read_bytes()
    (tmp_path / "frontier.json").mkdir()
    with pytest.raises(UserError, match=r"frontier\.json cannot be written"):
        write_all(tmp_path, None)
    assert shard.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_curves_of_several_folders_meet_on_one_page_and_a_missing_series_is_one_line(tmp_path: Path) -> None:
    gone = stream(tmp_path / "a", ["full", "h2o"], [0.5])
    write_shard(tmp_path / "a", gone)
    write_shard(tmp_path / "b", stream(tmp_path / "b", ["full", "h2o"], [0.25], run_id="smollm2-stream-0b0b0b0b"))
    (tmp_path / "a" / gone[0]["series_path"]).unlink()
    done = report(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "series file" in line] == [
        f"1 series file is missing; left out of the curves (first: {tmp_path / 'a' / gone[0]['series_path']})"
    ]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "s0-curves0" in page and "s0-curves1" in page
