"""Sweeps on real engines of this machine: worker processes, submitit, a SLURM controller with its node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.sweeping import ROOT, Sweep, survives

SLURM = (
    "hydra/launcher=slurm",
    "hydra.launcher.options.cpus_per_task=1",
    "hydra.launcher.poll_s=0.25",
    "hydra.launcher.patience_s=0.5",
)

COUNTING = '''
import os
from dataclasses import dataclass
from pathlib import Path

from harness.models.load import load
from tasks.needle import Needle


@dataclass(frozen=True, kw_only=True)
class Counting(Needle):
    """Writes down how often this process has loaded a model so far."""

    def examples(self, tokens, corpus, seed):
        with (Path(__file__).parent / "loads.txt").open("a") as file:
            file.write(f"{os.getpid()} {load.cache_info().misses}\\n")
        return super().examples(tokens, corpus, seed)
'''


@pytest.mark.slow
def test_joblib_survives_its_jobs(tmp_path: Path) -> None:
    survives(Sweep(tmp_path), ["hydra/launcher=joblib"], resumed=["hydra.launcher.n_jobs=1"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Debian's slurmctld (make ci-deps)")
def test_slurm_survives_its_jobs_without_accounting(tmp_path: Path) -> None:
    cluster = [str(ROOT / "tests" / "cluster" / "slurm.sh"), str(tmp_path / "slurm")]
    survives(Sweep(tmp_path), SLURM, within=cluster, also=["is_lost"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]], ids=["in_process", "joblib"])
def test_a_worker_loads_its_model_once(launcher: list[str], tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    (tmp_path / "counting.py").write_text(COUNTING)
    out = sweep.run("-m", "task._target_=counting.Counting", "limit=1", "seed=0,1,2", "compress=int8", *launcher)
    assert out.returncode == 0, out.stdout + out.stderr
    loads = [line.split() for line in (tmp_path / "loads.txt").read_text().splitlines()]
    assert [misses for _, misses in loads] == ["1", "1", "1"]
    assert len({process for process, _ in loads}) == 1


@pytest.mark.slow
def test_submitit_runs_on_this_machine(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    out = sweep.run("-m", "compress=int8", "hydra/launcher=submitit_local")
    assert out.returncode == 0, out.stdout + out.stderr
    assert sweep.statuses() == {("full", "ok"): 2, ("int8", "ok"): 2}
    assert "int8" in max(tmp_path.glob("multirun/*/*/0/log.txt")).read_text()
