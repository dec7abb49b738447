"""`python -m harness -m` in one process: folded jobs make the records of one fused run, mistakes stop it before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.records.progress import run_folders
from harness.report import merge
from tests.support.sweeping import Sweep


def test_a_sweep_over_stacks_is_one_fused_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(tmp_path)
    out = sweep.run("-m", "compress=int8,h2o,tova", "compress.points=[{}]", "seed=0,1")
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert lines[0].startswith("2 jobs, 8 arms;"), "the plan comes first"
    assert "seed=0" in lines[1] and "4 arms: full; int8; h2o; tova" in lines[1]
    assert "jobs: 2 ok, 0 failed; records: 16 ok" in out.stdout
    runs = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("results/*")}
    assert len(runs) == 2 and set(lines[-3:-1]) == runs
    assert (tmp_path / lines[-1]).name == "dashboard.html" and (tmp_path / lines[-1]).stat().st_size > 0
    assert all((tmp_path / run / "points.csv").stat().st_size > 0 for run in runs)

    place, seen = (tmp_path / lines[-1]).parent, tmp_path / "elsewhere"
    seen.mkdir()
    merge([place], seen / "page.html")
    assert all(Path(run).name in (seen / "page.html").read_text() for run in runs)
    monkeypatch.chdir(seen)
    assert run_folders(place) == [tmp_path / job["run"] for job in sweep.jobs()], "from anywhere"

    fixed = "'compress.points=[{}]'"
    out = sweep.run(f"stacks=[int8,[h2o,{fixed}],[tova,{fixed}]]", "results_dir=fused", "seed=1")
    assert out.returncode == 0, out.stderr
    fused = sweep.records("fused")
    assert set(fused) == {key for key, record in sweep.records().items() if record["seed"] == 1}


def test_a_stack_that_calls_exit_is_one_failure_and_the_sweep_is_resumed(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    out = sweep.run("-m", "compress=exits,int8", "compress.points=[{}]")
    assert out.returncode == 1
    assert "sys.exit(7)" in out.stderr and "jobs: 1 ok, 1 failed" in out.stdout
    assert sweep.statuses() == {("full", "ok"): 2, ("int8", "ok"): 2, ("exits", "failed"): 2}
    sweep.faults.unlink()
    assert sweep.run("-m", "compress=exits,int8", "compress.points=[{}]").returncode == 0
    assert sweep.statuses() == {("full", "ok"): 2, ("int8", "ok"): 2, ("exits", "ok"): 2}


REFUSED = {
    "a value of a later job": (["compress=int8", "seed=0,x"], "seed='x' is not possible"),
    "a later job's folder": (
        ["compress=int8", "results_dir=good,faulty.py/bad"],
        "faulty.py is not a folder that can be written",
    ),
    "a stack that lacks the key": (
        ["compress=h2o,int8", "compress.keep.budget.value=0.1,0.2"],
        "compress.keep.budget is not a key",
    ),
    "a launcher that is not installed": (["compress=h2o", "hydra/launcher=ray"], "pip install 'kv-harness[ray]'"),
    "a folder of an earlier sweep": (["compress=h2o", "hydra.sweep.dir=conf"], "hydra.sweep.dir=conf"),
}


@pytest.mark.parametrize("arguments, wanted", REFUSED.values(), ids=REFUSED)
def test_refused_before_the_start(arguments: list[str], wanted: str, tmp_path: Path) -> None:
    out = Sweep(tmp_path).run("-m", *arguments)
    assert out.returncode != 0
    assert "Traceback" not in out.stderr
    assert wanted in out.stderr.splitlines()[0]
    assert len(out.stderr.splitlines()) == 1 and "job" not in out.stdout
    assert not list(tmp_path.glob("results")) and not list(tmp_path.glob("multirun"))
