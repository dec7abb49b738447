"""Claims on a run folder, records of several tries and runs, waves that run out of memory or time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from harness.engine.batches import run_halving
from harness.engine.time_limit import TimedEngine, TimeLimitError, limited
from harness.errors import UserError
from harness.records.claims import Claims, held
from harness.records.progress import state
from harness.records.shards import latest
from harness.records.store import Store
from harness.report import merge
from harness.status import main as status_command
from harness.verify import verify
from tests.support import hostile
from tests.support.record_factory import make, write_shard
from tests.support.tiny_models import ids, tiny


def test_a_claim_is_one_writers_until_it_is_released_or_its_process_dies(tmp_path: Path) -> None:
    first, second = Claims(tmp_path / "claims"), Claims(tmp_path / "claims")
    assert first.take("a") and first.take("a") and not second.take("a") and second.take("b")
    assert held(tmp_path / "claims", "a") and not held(tmp_path / "claims", "c")
    first.release("a")
    assert second.take("a")
    pid = os.fork()
    if not pid:
        mine = Claims(tmp_path / "claims")
        mine.take("c")
        (tmp_path / "ready").touch()
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    assert not first.take("c")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert first.take("c"), "the dead hold nothing"
    first.close()
    second.close()
    assert not list((tmp_path / "claims").iterdir())


def test_a_failure_never_replaces_a_finished_record(tmp_path: Path) -> None:
    good = make(key="k", written_at="2026-01-01T00:00:00+00:00")
    bad = good | {"status": "failed", "score": None, "written_at": "2026-01-02T00:00:00+00:00"}
    newer = good | {"score": 0.0, "written_at": "2026-01-03T00:00:00+00:00"}
    assert latest([bad, good]) == [good] and latest([good, bad]) == [good]
    assert latest([newer, good, bad]) == [newer]
    write_shard(tmp_path, [good, bad], "a")
    assert Store(tmp_path).done == {"k"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"results_dir: .*file/run cannot be written: Not a directory"):
        Store(tmp_path / "file" / "run")


def test_status_of_a_run_without_manifests_has_no_arms(tmp_path: Path) -> None:
    write_shard(tmp_path, [make()])
    found = state(tmp_path)
    assert (found.arms, found.writers, found.seconds_left) == ((), 0, None)


@pytest.mark.parametrize("word", ["arms", "cells"])
def test_a_manifest_names_its_arms_which_older_ones_call_cells(word: str, tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    asked = {word: [["full", "a"], ["h2o keep.budget.value=0.5", "b"]], "examples": [[0, "one", "c"]]}
    (tmp_path / "manifests" / "20260101T000000Z-abcdef.json").write_text(json.dumps(hostile.manifest(asked=asked)))
    assert [(arm.name, arm.missing) for arm in state(tmp_path).arms] == [("full", 1), ("h2o keep.budget.value=0.5", 1)]


@pytest.mark.parametrize("text", ["{}", "[]", '{"time": 3, "config": {}}', '{"time": "2026-01-01T00:00:00+00:00"}', "{"])
def test_a_manifest_that_is_not_ours_is_passed_over(text: str, tmp_path: Path) -> None:
    write_shard(tmp_path, [make()])
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "20260101T000000Z-abcdef.json").write_text(text)
    found = state(tmp_path)
    assert (found.arms, found.writers, found.seconds_left) == ((), 0, None)
    with pytest.raises(UserError, match="has no manifest"):
        verify(tmp_path)


def test_a_sweeps_folder_stands_for_the_runs_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "multirun" / "day" / "time"
    place.mkdir(parents=True)
    names = [f"results/{name}" for name in ("a", "gone", "a")]
    (place / "sweep.json").write_text(json.dumps([{"run": name, "cwd": "/no/such/place"} for name in names]))
    (tmp_path / "results" / "a" / "manifests").mkdir(parents=True)
    write_shard(tmp_path / "results" / "a", [make()])
    missing = "results/gone: there is no such folder"
    assert status_command([str(place)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/results/a: 0 ok" in out and out.splitlines().count(missing) == 1
    merge([place], tmp_path / "page.html")
    assert missing in capsys.readouterr().out.splitlines() and (tmp_path / "page.html").stat().st_size
    for text in ("{", '{"a": 1}', "[3]", '[{"job": 0}]'):
        (place / "sweep.json").write_text(text)
        assert status_command([str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "sweep.json is not the summary of a sweep" in line


def test_torchs_own_out_of_memory_halves_the_wave() -> None:
    sizes: list[int] = []

    def run(part: list[int]) -> list[int]:
        sizes.append(len(part))
        if len(part) > 2 or 5 in part:
            torch.empty(1 << 50, dtype=torch.uint8)  # a pebibyte: no machine has it
        return [2 * one for one in part]

    lines: list[str] = []
    done = run_halving(run, list(range(8)), lambda item, line, trace: lines.append(line) or -1)  # type: ignore[func-returns-value]
    assert done == [0, 2, 4, 6, 8, -1, 12, 14], "only what fails alone fails"
    assert sizes == [8, 4, 2, 2, 4, 2, 1, 1, 2]
    assert len(lines) == 1 and "RuntimeError" in lines[0] and "memory" in lines[0]


def test_a_forward_ends_between_layers_once_its_time_is_up() -> None:
    model = tiny("llama")
    engine = TimedEngine(model, torch.float32, (), seconds=0.05)
    engine.prefill(ids(8))
    slow = model.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.06))
    try:
        with pytest.raises(TimeLimitError, match=r"time_limit=0\.05 s"):
            engine.prefill(ids(8))
    finally:
        slow.remove()
    with pytest.raises(TimeLimitError), limited(engine):
        for _ in range(100):
            engine.prefill(ids(8))  # one limit over all of them
            time.sleep(0.01)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers), "nothing stays behind"


def test_a_folder_of_runs_is_one_report_also_where_cells_or_whole_jobs_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, status in (("a", "ok"), ("b", "failed")):
        (tmp_path / run / "manifests").mkdir(parents=True)
        score = {"status": status, "score": 1.0 if status == "ok" else None, "error": None if status == "ok" else "KeyError: x"}
        write_shard(tmp_path / run, [make(run_id=run, stack="full"), make(run_id=run, stack="h2o", **score)])
    (tmp_path / "c" / "manifests").mkdir(parents=True)  # a job that died before its first record
    merge([tmp_path], tmp_path / "page.html")
    out = capsys.readouterr().out
    assert f"{tmp_path / 'c'}: no records" in out and "1 failed - KeyError: x" in out
    assert (tmp_path / "page.html").stat().st_size > 0
