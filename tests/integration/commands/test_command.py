"""`python -m harness` as a user meets it: a whole run on the tiny model, bad input, repeats, a method from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.started import harness

ROOT = Path(__file__).parents[3]
TINY = ("model=tiny_llama", "corpus=stdlib", "progress=false", "task.lengths=[600]", "task.per_cell=1", "limit=2")


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for shard in sorted(folder.glob("records-*.jsonl")) for line in shard.read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(working directory, run folder) of the canonical command on the tiny model, in an interpreter of its own."""
    cwd = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "harness", *TINY, "compress=sink_h2o_int8", "task=needle"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert out.returncode == 0, out.stderr
    assert "Traceback" not in out.stderr
    yield cwd, cwd / out.stdout.strip().splitlines()[-1]


def test_the_canonical_command_writes_everything(done: tuple[Path, Path]) -> None:
    _, folder = done
    found = records(folder)
    assert {(r["stack"], str(r["point"])) for r in found} == {
        ("full", "{}"),
        *(("sink_h2o_int8", str({"keep.budget.value": v})) for v in (0.1, 0.25, 0.5, 0.75)),
    }
    assert len(found) == 2 * 5
    for name in ("points.csv", "points.parquet", "frontier.json", "dashboard.html"):
        assert (folder / name).stat().st_size > 0
    manifest = json.loads(next((folder / "manifests").glob("*.json")).read_text())
    assert {"config", "versions", "machine", "model", "corpus", "code_sha256"} <= set(manifest)


def test_records_say_what_happened(done: tuple[Path, Path]) -> None:
    by_stack = {(r["stack"], *r["point"].values()): r for r in records(done[1])}
    full, half = by_stack["full",], by_stack["sink_h2o_int8", 0.5]
    assert full["kv_bytes_context"] == full["kv_bytes_full"]
    assert half["kv_bytes_context"] == sum(half["bytes"]["allocated"].values()) < half["kv_bytes_full"]
    assert half["tokens_kept"] == -(-half["tokens_seen"] // 2)
    assert half["bytes"]["logical"]["state"] > 0, "H2O's scores are bytes"
    assert half["bytes"]["logical"]["positions"] > 0, "positions of kept rows are bytes"
    assert half["prompt_sha256"] == full["prompt_sha256"]
    assert half["n_prompt"] + 600 - full["n_prompt"] == 600
    assert half["kv_bytes_peak_prefill"] > full["kv_bytes_peak_prefill"] >= full["kv_bytes_context"]


def test_the_same_command_again_does_nothing_again(done: tuple[Path, Path]) -> None:
    cwd, folder = done
    before = {path.name: path.read_bytes() for path in folder.glob("records-*.jsonl")}
    out = harness(*TINY, "compress=sink_h2o_int8", "task=needle", cwd=cwd)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip().splitlines()[-1] == str(folder.relative_to(cwd))
    assert {path.name: path.read_bytes() for path in folder.glob("records-*.jsonl")} == before


def test_a_scorer_from_outside_runs_and_is_on_the_plot(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "conf" / "compress").mkdir(parents=True)
    readme = (ROOT / "README.md").read_text()
    python, yaml = (readme.split(f"```{kind}\n", 1)[1].split("```", 1)[0] for kind in ("python", "yaml"))
    (mine / "value_norm.py").write_text(python)
    (mine / "conf" / "compress" / "value_norm.yaml").write_text(yaml)
    out = harness(*TINY, "--config-dir", str(mine / "conf"), "stacks=[value_norm]", cwd=tmp_path, path=tmp_path)
    assert out.returncode == 0, out.stderr
    folder = tmp_path / out.stdout.strip().splitlines()[-1]
    assert {r["stack"] for r in records(folder)} == {"full", "value_norm"}
    assert "value_norm" in (folder / "dashboard.html").read_text()


BAD = {
    "unknown stack": (["compress=nosuch"], "compress=nosuch is not there"),
    "list for compress": (["compress=[h2o,int8]"], "stacks=[h2o,int8]"),
    "comma without -m": (["task=needle,stream"], "-m task=needle,stream"),
    "unknown member of stacks": (["stacks=[int8,nosuch]"], "nosuch"),
    "budget below sinks + recent": (
        ["compress=sink_h2o", "compress.keep.budget.unit=tokens", "compress.keep.budget.value=16", "compress.keep.recent=32"],
        "need at least 36",
    ),
    "group that does not divide": (["compress=int4", "compress.values.group=48"], "must divide head_dim 64"),
    "eviction inside key blocks": (["compress=h2o", "codec@compress.keys=int4"], "legal are"),
    "a key that is not there": (["task.foo=1"], "task.foo is not a key: task has answer_prefix, aware_of"),
    "a group's missing member": (["compress=h2o", "codec@compress.keys=foo"], "codec=foo is not there: exact, "),
    "an open bracket": (["task.lengths=[300"], "task.lengths=[300 is not understood"),
    "an interpolation of nothing": (["task.lengths=${foo}"], "'foo' not found"),
    "missing model": (["model=local", "model.path=/nonexistent"], "/nonexistent"),
    "prompt above the limit": (["task.lengths=[9000]"], "8192"),
    "a stack that lacks the key": (
        ["compress=int8", "compress.keep.budget.value=0.5"],
        "compress.keep.budget is not a key",
    ),
}


@pytest.mark.parametrize("arguments, wanted", BAD.values(), ids=BAD)
def test_bad_input_is_one_line(arguments: list[str], wanted: str, tmp_path: Path) -> None:
    out = harness(*TINY, *arguments, cwd=tmp_path)
    assert out.returncode != 0
    assert "Traceback" not in out.stderr
    assert wanted in out.stderr
    (line,) = out.stderr.strip().splitlines()
    assert line.startswith("error: "), line
    assert not list(tmp_path.rglob("records-*.jsonl"))


def test_empty_haystack_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    out = harness("model=tiny_llama", "corpus=path", f"corpus.path={tmp_path / 'empty.txt'}", cwd=tmp_path)
    assert out.returncode != 0 and "Traceback" not in out.stderr
    assert "corpus" in out.stderr.splitlines()[0]


def broken(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A run of int8 and of a stack whose scorer does this."""
    (tmp_path / "conf" / "compress").mkdir(parents=True)
    (tmp_path / "broken.py").write_text(
        "from dataclasses import dataclass\nfrom harness.stages.protocols import Scorer\n\n"
        f"@dataclass(frozen=True, kw_only=True)\nclass Broken(Scorer):\n    def score(self, view):\n        {body}\n"
    )
    (tmp_path / "conf" / "compress" / "broken.yaml").write_text(
        "defaults:\n  - /keep@keep: sink_h2o\n  - /codec@keys: exact\n  - /codec@values: exact\n  - _self_\n"
        "_target_: harness.stages.stack.Stack\nname: broken\nphase: prefill\nkeep:\n  scorer:\n    _target_: broken.Broken\n"
        "points: [{}]\n"
    )
    return harness(*TINY, "--config-dir", str(tmp_path / "conf"), "stacks=[broken,int8]", cwd=tmp_path, path=tmp_path)


@pytest.mark.parametrize(
    "body, error, kind",
    [
        ("raise RuntimeError('no such luck')", "no such luck", "RuntimeError"),
        (
            "return view.k_HND.sum(-1) * float('nan')",
            "keep.scorer=Broken returned a score that is not finite in layer 0",
            "ValueError",
        ),
    ],
    ids=["raises", "not finite"],
)
def test_a_broken_scorer_is_a_failed_record_and_the_rest_goes_on(body: str, error: str, kind: str, tmp_path: Path) -> None:
    out = broken(tmp_path, body)
    assert out.returncode == 1
    folder = tmp_path / out.stdout.strip().splitlines()[-1]
    status = {(r["stack"], r["status"]) for r in records(folder)}
    assert status == {("full", "ok"), ("int8", "ok"), ("broken", "failed")}
    failed = next(r for r in records(folder) if r["stack"] == "broken")
    assert error in failed["error"]
    assert kind in (folder / "failures" / f"{failed['key'][:16]}.txt").read_text()


def test_a_scorer_that_exits_is_told(tmp_path: Path) -> None:
    out = broken(tmp_path, "raise SystemExit(3)")
    assert out.returncode == 1
    (line,) = out.stderr.strip().splitlines()
    assert line.startswith("error: a part of this run called exit(3): finished records are safe")
