"""A hostile run folder under every command that reads one: nothing outside it is touched, nothing runs, each is one line."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hydra
import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from harness import report, status, verify
from harness.command import execute
from harness.errors import UserError
from harness.evaluation.assemble import run_folder
from harness.records.shards import read
from tests.integration.commands.test_command import ROOT
from tests.support import hostile, lm_eval_tasks
from tests.support.running import CELL

pytestmark = pytest.mark.usefixtures("composed_once")

TINY = [*CELL, "stacks=[int8]"]


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whoever waits for a pipe is ended; their modules could be imported from here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    signal.alarm(240)
    yield
    signal.alarm(0)


def said(text: str, run: Path, *, twice: bool = False) -> None:
    """Each thing that is not ours is named in one line, and no line says more than a line may."""
    lines = text.splitlines()
    for name in ("link", "dangling", "folder", "pipe", "socket"):
        assert sum(f"{run / f'records-{name}.jsonl'} is a " in line for line in lines) == 1, (name, text)
    assert sum("records-notes.jsonl:1 is not a record of this program" in line for line in lines) == 1
    assert sum("records-hard.jsonl:1 is not a record of this program" in line for line in lines) == 1
    assert sum("more lines passed over" in line for line in lines) == 1
    assert all(line.isprintable() for line in lines) and "Traceback" not in text


def test_status_report_and_verify_of_a_hostile_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile.build(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    assert status.main([str(run)]) == 0
    out = capsys.readouterr()
    said(out.err, run)
    assert "[/x] h2o" in out.out and "nobody at work" in out.out and "1 missing" in out.out
    assert sum("is no manifest: " in line for line in out.err.splitlines()) == 5
    assert report.main([str(run), "--out", str(tmp_path / "page.html"), "--against", "full"]) == 0
    table = capsys.readouterr().out
    assert "[bold]b[/bold]" in table and "[/x]" in table and "\x1b" not in table and "line\\nbreak" in table
    code = verify.main([str(run), "--sample", "20"])
    out = capsys.readouterr()
    assert code == 1 and "0 equal, 7 differing" in out.out and out.out.count("its example does not exist any more") == 7, (
        out.err
    )
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before, "who only reads changes nothing"
    assert hostile.untouched(tmp_path) == []


def test_the_same_command_goes_on_in_a_hostile_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*TINY, f"results_dir={tmp_path / 'results'}"]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("config", overrides=overrides)
        place = run_folder(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        built = hostile.build(tmp_path)
        built.rename(place)
        notes = (place / "records-notes.jsonl").read_bytes()
        folder, failed = execute(cfg, overrides)
    GlobalHydra.instance().clear()
    out = capsys.readouterr()
    assert (folder, failed) == (place, 0) and "4 ok, 0 failed" in out.out
    said(out.err, place)
    assert hostile.untouched(tmp_path) == [] and (place / "records-notes.jsonl").read_bytes() == notes
    assert not (place / "points.csv").is_symlink() and len(pd.read_csv(place / "points.csv")), (
        "the link gave way, its file stayed"
    )
    assert len([one for one in read(place) if one["run_id"] == place.name]) == 4
    assert verify.main([str(place), "--sample", "4"]) in (0, 1)
    assert hostile.untouched(tmp_path) == []
    shutil.rmtree(place)
    hostile.build(tmp_path / "again", links_to_folders=True).rename(place)
    with (
        hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
        pytest.raises(UserError, match="manifests is a link, not a folder of this run"),
    ):
        execute(cfg, overrides)
    assert hostile.untouched(tmp_path / "again") == []


def test_a_folder_of_runs_is_reported_beside_a_hostile_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile.build(tmp_path)
    only = tmp_path / "results" / "only-foreign"
    (only / "manifests").mkdir(parents=True)
    (only / "records-x.jsonl").write_text("model,score\n")
    assert report.main([str(tmp_path / "results"), "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr()
    said(out.err, run)
    assert f"{only / 'records-x.jsonl'}:1 is not a record" in out.err
    (tmp_path / "sweep.json").write_text(json.dumps([{"run": "results/\x1b[2J", "cwd": "/"}, {"run": str(run)}]))
    assert status.main([str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_outputs_of_records_that_are_no_answers_end_no_lm_eval_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kind: a record's text that is read as data by what comes after it."""
    tasks = lm_eval_tasks.write(tmp_path / "tasks", 2)
    overrides = ["model=tiny_llama", "progress=false", "stacks=[int8]", f"results_dir={tmp_path / 'results'}", "task=lm_eval"]
    overrides += [f"task.name={lm_eval_tasks.CLOZE}", f"task.include_path={tasks}"]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("config", overrides=overrides)
        folder, failed = execute(cfg, overrides)
        (shard,) = folder.glob("records-*.jsonl")
        lines = [json.loads(line) for line in shard.read_text().splitlines()]
        shard.write_text("".join(json.dumps(one | {"output": "[" * at or None}) + "\n" for at, one in enumerate(lines)))
        capsys.readouterr()
        assert (failed, execute(cfg, overrides)) == (0, (folder, 0))
    GlobalHydra.instance().clear()
    assert "is no answer of lm-eval's; passed over" in capsys.readouterr().err
    assert verify.main([str(folder)]) == 2 and "--allow task.include_path" in capsys.readouterr().err
    assert verify.main([str(folder), "--allow", "task.include_path"]) == 1
