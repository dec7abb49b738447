"""Sweeps as a user starts them, with stacks that misbehave on demand. Each is a real process and a real scorer."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.started import started

ROOT = Path(__file__).parents[2]
STACKS = ("raises", "exits", "is_killed", "is_lost")
TINY = ("model=tiny_llama", "corpus=stdlib", "progress=false", "task.lengths=[300]", "task.per_cell=1", "limit=2")
SCORER = '''
import os, signal
from dataclasses import dataclass
from pathlib import Path

from harness.stages.protocols import Scorer


@dataclass(frozen=True, kw_only=True)
class Faulty(Scorer):
    """Misbehaves as long as there is a file `faults` beside this one."""

    how: str

    def score(self, view):
        if (Path(__file__).parent / "faults").exists():
            if self.how == "raises":
                raise RuntimeError("no such luck")
            if self.how == "exits":
                raise SystemExit(7)
            if self.how == "is_lost":  # with the process that waits for it, so that nobody can tell
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return view.v_HND.norm(dim=-1)
'''
STACK = """
defaults: [/keep@keep: sink_h2o, /codec@keys: exact, /codec@values: exact, _self_]
_target_: harness.stages.stack.Stack
name: {how}
phase: prefill
keep:
  scorer:
    _target_: faulty.Faulty
    how: {how}
points: [{{keep.budget.value: 0.5}}]
"""


class Sweep:
    """A working directory, a configuration directory with faulty stacks, and the sweeps that were run there."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        (cwd / "conf" / "compress").mkdir(parents=True)
        (cwd / "faulty.py").write_text(SCORER)
        for how in STACKS:
            (cwd / "conf" / "compress" / f"{how}.yaml").write_text(STACK.format(how=how))
        self.faults = cwd / "faults"
        self.faults.touch()

    def run(self, *arguments: str, within: Sequence[str] = (), timeout: int = 420) -> subprocess.CompletedProcess[str]:
        """`python -m harness` on the tiny model; `within` is a command to run it in."""
        path = {"PYTHONPATH": os.pathsep.join(map(str, (self.cwd, ROOT)))}
        command = ["--config-dir", "conf", *TINY, *arguments]
        if not within:
            return started("harness", command, self.cwd, path, timeout)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **path}
        command = [*within, sys.executable, "-m", "harness", *command]
        return subprocess.run(command, cwd=self.cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout)

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of the latest sweep, as its summary has them."""
        found: list[dict[str, Any]] = json.loads(max(self.cwd.glob("multirun/*/*/sweep.json")).read_text())
        return found

    def records(self, results: str = "results") -> dict[str, dict[str, Any]]:
        """The latest record of every key in all run folders."""
        shards = sorted(self.cwd.glob(f"{results}/*/records-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        lines = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
        return {record["key"]: record for record in lines}

    def lines(self) -> list[dict[str, Any]]:
        """All records ever written."""
        return [
            json.loads(line) for shard in self.cwd.glob("results/*/records-*.jsonl") for line in shard.read_text().splitlines()
        ]

    def statuses(self) -> Counter[tuple[str, str]]:
        """How many records of each stack have each status."""
        return Counter((record["stack"], record["status"]) for record in self.records().values())


def survives(
    sweep: Sweep, launcher: Sequence[str], within: Sequence[str] = (), also: Sequence[str] = (), resumed: Sequence[str] = ()
) -> None:
    """One stack raises and others die: the rest finish, all failures are reported, and the same command resumes.

    Args:
        sweep: where.
        launcher: overrides that choose it.
        within: a command to run both sweeps in.
        also: further stacks that die.
        resumed: overrides of the second sweep alone, such as fewer workers to start.
    """
    stacks = f"compress={','.join(['int8', 'raises', 'is_killed', *also])}"
    arguments = ("-m", stacks, "compress.points=[{}]", *launcher)
    out = sweep.run(*arguments, within=within)
    assert out.returncode == 1, out.stdout + out.stderr
    assert "Traceback" not in out.stderr
    failed = {job["overrides"][-2]: job for job in sweep.jobs() if job["status"] != "ok"}
    assert set(failed) == {f"compress={name}" for name in ("raises", "is_killed", *also)}, failed
    assert "2 records failed" in failed["compress=raises"]["reason"]
    assert "SIGKILL" in failed["compress=is_killed"]["reason"]
    assert f"jobs: 1 ok, {len(failed)} failed" in out.stdout
    assert all(f"compress={name}" in out.stderr for name in ("raises", "is_killed")), "what to type to run them again"
    rows = {("full", "ok"): 2, ("int8", "ok"): 2, ("raises", "failed"): 2, ("is_killed", "failed"): 2}
    assert sweep.statuses() == rows | {(name, "failed"): 2 for name in also}
    assert f"records: 4 ok, {2 + 2 * (1 + len(also))} failed" in out.stdout
    doubled = [record for record in sweep.lines() if record["attempt"] > 1 and record["stack"] != "raises"]
    assert not doubled, "stacks that run again side by side share the full cache's records"
    folder = sweep.cwd / out.stdout.strip().splitlines()[-1]
    killed = [record["error"] for record in sweep.lines() if record["stack"] == "is_killed"]
    assert all("the job ended before this record was made: " in line and "SIGKILL" in line for line in killed), killed
    assert all((folder / line.rsplit("(", 1)[1].rstrip(")")).is_file() for line in killed if "(failures/" in line), killed
    with (folder / "points.csv").open() as file:
        points = {row["stack"]: row for row in csv.DictReader(file)}
    assert {name: row["n_failed"] for name, row in points.items()} == {name: str(2 * (name in STACKS)) for name in points}
    assert points["int8"]["n"] == "2" and points["is_killed"]["n"] == "0" and points["is_killed"]["score"] == ""
    assert (folder / "dashboard.html").exists()

    finished = {key for key, record in sweep.records().items() if record["status"] == "ok"}
    sweep.faults.unlink()
    out = sweep.run(*arguments, *resumed, within=within)
    assert out.returncode == 0, out.stdout + out.stderr
    names = ("full", "int8", "raises", "is_killed", *also)
    assert sweep.statuses() == {(name, "ok"): 2 for name in names}
    assert finished <= set(sweep.records())
