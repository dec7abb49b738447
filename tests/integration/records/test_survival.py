"""Sweeps that survive: killed at any moment, many writers on one folder, disks that are full, files that are damaged.

All runs of this file are children of one process (tests/support/forked.py), but for the one that is the command itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.points import points
from harness.records.shards import load_records
from tests.support.started import ROOT, harness, started

EXAMPLES, POINTS, LAYERS = 12, 4, 4
RECORDS = EXAMPLES * (POINTS + 1)
WAVE = 5  # most rows at once under the memory limit below
VARIES = ("timings", "attempt", "writer", "written_at")

PARENTS: dict[Path, subprocess.Popen[str]] = {}
COUNTED = '''
import os, time
from dataclasses import dataclass
from harness.stages.score.knorm import KeyNorm

@dataclass(frozen=True, kw_only=True)
class Counted(KeyNorm):
    """Key norm that leaves a line for every layer it scores, so that work done twice shows."""

    seconds: float = 0.0

    def score(self, view):
        with open(os.environ["COMPUTED"], "a") as file:
            file.write("x\\n")
        if os.environ.get("FAIL_AT") == str(view.k_HND.shape[1]):
            raise RuntimeError("told to fail")
        time.sleep(self.seconds)
        return super().score(view)
'''
STACK = """
defaults: [/keep@keep: knorm, /codec@keys: exact, /codec@values: exact, _self_]
_target_: harness.stages.stack.Stack
name: {name}
phase: {phase}
keep:
  scorer: {{_target_: counted.Counted, seconds: {seconds}}}
points: {points}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions, a scorer that leaves traces, and stacks that use it."""
    folder = tmp_path_factory.mktemp("survival")
    (folder / "conf" / "compress").mkdir(parents=True)
    (folder / "counted.py").write_text(COUNTED)
    fractions = [{"keep.budget.value": value} for value in (0.2, 0.4, 0.6, 0.8)]
    for name, phase, seconds, at in (("counted", "prefill", 0, fractions), ("slow", "prefill", 0.3, fractions[:1])):
        text = STACK.format(name=name, phase=phase, seconds=seconds, points=json.dumps(at))
        (folder / "conf" / "compress" / f"{name}.yaml").write_text(text)
    rows = [
        {"id": f"q{i}", "context": f"{i} " + "the quick brown fox " * (10 + i), "question": "what?", "answers": ["fox"]}
        for i in range(EXAMPLES)
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, results: str, stacks: str = "counted", **more: Any) -> dict[str, Any]:
    """A step: the command with its results in a folder of their own."""
    base = [
        "model=tiny_llama",
        "corpus=stdlib",
        "progress=false",
        "task=jsonl",
        f"task.path={place / 'mine.jsonl'}",
        "task.max_new_tokens=6",
    ]
    base += ["memory_limit=3MiB", f"stacks=[{stacks}]", f"results_dir={results}"]
    more["env"] = {"COMPUTED": str(place / f"{results}.computed")} | more.get("env", {})
    return {"arguments": [*base, *more.pop("extra", []), "--config-dir", str(place / "conf")]} | more


@pytest.fixture(scope="module", autouse=True)
def _parent(place: Path) -> Iterator[None]:
    """The process whose children all runs are."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(place), str(ROOT)))}
    command = [sys.executable, "-m", "tests.support.forked"]
    with subprocess.Popen(command, cwd=place, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        PARENTS[place] = process
        yield
        process.communicate()


def play(place: Path, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run steps one after another."""
    outcomes = []
    for one in steps:
        process = PARENTS[place]
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(one) + "\n")
        process.stdin.flush()
        outcomes.append(json.loads(process.stdout.readline()))
    return outcomes


def folder_of(place: Path, results: str) -> Path:
    return next((place / results).iterdir())


def raw(place: Path, results: str) -> list[dict[str, Any]]:
    """Every line of every shard: none may be damaged."""
    return [json.loads(x) for s in folder_of(place, results).glob("records-*.jsonl") for x in s.read_text().splitlines()]


def bare(records: Any) -> dict[str, dict[str, Any]]:
    return {r["key"]: {name: value for name, value in r.items() if name not in VARIES} for r in records}


def computed(place: Path, results: str) -> int:
    """Rows that were compressed, written or not."""
    return len((place / f"{results}.computed").read_text().splitlines()) // LAYERS


@pytest.fixture(scope="module")
def reference(place: Path) -> dict[str, dict[str, Any]]:
    out = play(place, [run(place, "reference")])[0]
    assert (out["codes"], out["records"]) == ([0], RECORDS), out["text"]
    assert "60 ok, 0 failed" in out["text"]
    records = raw(place, "reference")
    assert max(r["timings"]["batch_sequences"] for r in records) <= WAVE
    assert computed(place, "reference") == EXAMPLES * POINTS
    return bare(records)


@pytest.mark.slow
def test_killed_at_twenty_moments_the_records_are_those_of_an_uninterrupted_run(place: Path, reference: dict) -> None:
    draw = random.Random(20)
    steps = []
    for kill in range(20):
        moment = {"after_records": 1} if kill % 2 else {"after_s": draw.uniform(0.05, 0.5)}
        steps.append(run(place, "killed", **moment, cut=40 if kill % 7 == 6 else 0))
    outcomes = play(place, [*steps, run(place, "killed"), run(place, "killed")])
    kills, cut = sum(o["killed"] for o in outcomes[:20]), sum(bool(s["cut"]) for s in steps)
    assert kills >= 12 and all(o["codes"] in ([-signal.SIGKILL], [0]) for o in outcomes)
    assert outcomes[-1]["records"] == 0, "a finished run makes nothing again"
    assert bare(raw(place, "killed")) == reference
    assert len(raw(place, "killed")) == RECORDS, "none doubled"
    assert computed(place, "killed") - EXAMPLES * POINTS <= kills * WAVE + cut
    assert any("cut short" in o["text"] for o in outcomes)
    assert not list((folder_of(place, "killed") / "claims").iterdir()), "claims go with their writers"


def test_four_workers_on_one_folder_make_every_record_once(place: Path, reference: dict) -> None:
    out = play(place, [run(place, "four", workers=4)])[0]
    assert out["codes"] == [0] * 4, out["text"]
    records = raw(place, "four")
    assert len(records) == RECORDS and bare(records) == reference
    assert computed(place, "four") == EXAMPLES * POINTS, "nothing was done twice"
    assert len({r["writer"] for r in records}) > 1
    assert out["text"].count("60 ok, 0 failed") == 4, "every worker waits for what the others have in hand"


def test_a_dead_writers_claims_are_taken_over_and_other_cells_only_add(place: Path, reference: dict) -> None:
    more = run(place, "added", "counted,int8")
    killed = run(place, "added", workers=3, after_records=6)
    again = run(place, "added", extra=["redo=true"])
    outcomes = play(place, [killed, run(place, "added", workers=2), more, again])
    assert outcomes[0]["killed"] and outcomes[0]["records"] + outcomes[1]["records"] == RECORDS
    assert outcomes[2]["records"] == EXAMPLES, "int8 alone is new"
    assert outcomes[3]["records"] == RECORDS, "redo makes them all again"
    loaded = load_records(folder_of(place, "added"))
    mine = [r for r in loaded if r["stack"] != "int8"]
    assert bare(mine) == reference and loaded.duplicates == RECORDS
    assert {r["attempt"] for r in mine} == {2} and {r["attempt"] for r in loaded if r["stack"] == "int8"} == {1}


def test_failures_are_rows_counted_left_out_and_made_again_alone(place: Path, reference: dict) -> None:
    lengths = Counter(r["tokens_seen"] for r in reference.values())
    told = {"env": {"COMPUTED": str(place / "failed.computed"), "FAIL_AT": str(max(lengths))}}
    first, second = play(place, [run(place, "failed", **told), run(place, "failed")])
    assert first["codes"] == [1] and second["codes"] == [0], first["text"]
    assert f"{RECORDS - POINTS} ok, {POINTS} failed" in first["text"]
    line = next(line for line in first["text"].splitlines() if line.startswith("only what failed runs again with: "))
    assert "stacks=[counted]" in line and f"--config-dir {place / 'conf'}" in line
    assert second["records"] == POINTS, "only what failed"
    written = raw(place, "failed")
    bad = [r for r in written if r["status"] == "failed"]
    assert {r["error"].split(" (")[0] for r in bad} == {"RuntimeError: told to fail"}
    traces = {folder_of(place, "failed") / "failures" / f"{r['key'][:16]}.txt" for r in bad}
    assert len(traces) == POINTS and all("Traceback" in path.read_text() for path in traces)
    table = points([r for r in written if r["attempt"] == 1])
    failed = table[table["stack"] == "counted"]
    assert set(failed["n"]) == {EXAMPLES - 1} and set(failed["n_failed"]) == {1} and failed["score"].notna().all()
    assert bare(load_records(folder_of(place, "failed"))) == reference


def test_a_record_over_the_time_limit_fails_and_the_others_go_on(place: Path) -> None:
    out = play(place, [run(place, "timed", "slow,int8", extra=["time_limit=1", "limit=2"])])[0]
    assert out["codes"] == [1]
    assert "4 ok, 2 failed" in out["text"]
    by_stack = {(r["stack"], r["status"]) for r in raw(place, "timed")}
    assert by_stack == {("full", "ok"), ("int8", "ok"), ("slow", "failed")}
    assert "longer than time_limit=1 s" in next(r["error"] for r in raw(place, "timed") if r["status"] == "failed")


def test_a_full_disk_is_one_line_and_loses_nothing(place: Path, reference: dict) -> None:
    full, rest = play(place, [run(place, "full", file_limit=60_000), run(place, "full")])
    assert full["codes"] == [1] and 0 < full["records"] < RECORDS
    assert "Traceback" not in full["text"] and "results_dir: " in full["text"].splitlines()[-1]
    assert "cannot be written: File too large" in full["text"]
    assert rest["codes"] == [0] and rest["records"] == RECORDS - full["records"]
    assert bare(raw(place, "full")) == reference


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of its own with 100 kB, or None for who may not mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", point], capture_output=True, check=False).returncode:
        yield None
        return
    yield point
    subprocess.run(["umount", point], check=True)


def test_a_disk_that_fills_and_one_that_is_read_only(place: Path, disk: Path | None, tmp_path: Path, reference: dict) -> None:
    traces = {"env": {"COMPUTED": str(tmp_path / "computed")}}
    if disk is None:
        (tmp_path / "shut").mkdir(mode=0o555)
        out = play(place, [run(place, str(tmp_path / "shut"), **traces)])[0]
        assert out["codes"] == [1] and "cannot be written: Permission denied" in out["text"]
        return
    step = run(place, str(disk), **traces)
    full = play(place, [step])[0]
    assert full["codes"] == [1] and 0 < full["records"] < RECORDS and len(full["text"].splitlines()) == 1, full["text"]
    assert "results_dir: " in full["text"] and "No space left on device" in full["text"]
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
    rest = play(place, [step])[0]
    records = load_records(next(disk.iterdir()))
    assert rest["codes"] == [0] and bare(records) == reference and records.duplicates == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    shut = play(place, [step])[0]
    assert shut["codes"] == [1] and len(shut["text"].splitlines()) == 1, shut["text"]
    assert "cannot be written: Read-only file system" in shut["text"]


def test_seeds_are_one_run_whose_points_pool_them(place: Path) -> None:
    needle = ["task=needle", "task.lengths=[300]", "task.depths=[0.0,1.0]", "task.per_cell=1", "task.chat=false"]
    both = {"arguments": ["model=tiny_llama", "corpus=stdlib", "progress=false", "stacks=[int8]", "results_dir=seeds", *needle]}
    both["arguments"].append("seed=[0,7]")
    same = run(place, "same", "int8", extra=["seed=[0,1]"])
    wrong = run(place, "wrong", "int8", extra=["seed=[0,0]"])
    done, refused, doubled = play(place, [both, same, wrong])
    assert done["codes"] == [0], done["text"]
    records = raw(place, "seeds")
    assert Counter(r["seed"] for r in records) == {0: 4, 7: 4} and len({r["prompt_sha256"] for r in records}) == 4
    table = points(records)
    assert set(table["n"]) == {4} and set(table["seeds"]) == {"0,7"} and table["diff_reason"].isna().sum() == 1
    assert refused["codes"] == [1] and "seed=1 gives no new examples" in refused["text"]
    assert doubled["codes"] == [1] and "a list of different ones" in doubled["text"]


def spoiled(place: Path, name: str, change: Any) -> Path:
    """A copy of the finished run whose one shard was changed."""
    source = folder_of(place, "reference")
    folder = place / name / source.name
    folder.mkdir(parents=True)
    text = next(source.glob("records-*.jsonl")).read_text()
    (folder / "records-other-1-abcdef.jsonl").write_text(change(text.splitlines(keepends=True)))
    return folder


def old(line: str) -> str:
    record = json.loads(line) | {"schema": 1}
    for name in ("written_at", "writer", "attempt"):
        del record[name]
    return json.dumps(record).replace('"depth": null', '"depth": NaN') + "\n"


READ = {
    "of schema 1, with NaN": (lambda lines: "".join(map(old, lines)), 0, ""),
    "damaged in the middle": (lambda lines: "".join([*lines[:9], lines[9][:99] + "\n", *lines[10:]]), 1, ""),
    "cut short": (lambda lines: "".join(lines)[:-30], 1, "its last line was cut short; that record is made again"),
    "without its last line break": (lambda lines: "".join(lines)[:-1], 0, ""),
    "with zeros at its end": (lambda lines: "".join(lines[:-1]) + "\0" * 50, 1, "cut short"),
}
PASSED = {
    "foreign": (lambda lines: '{"a": 1}\n', "is not a record of this program"),
    "foreign, unended": (lambda lines: "hello", ":1 is not a record"),
    "of a later schema": (
        lambda lines: "".join(lines).replace('"schema": 3', '"schema": 4'),
        "schema=4: this version reads 1, 2, 3",
    ),
    "half a record": (lambda lines: '{"key": "k", "schema": 2, "run_id": "r", "stack": "s"}\n', "is no whole record"),
}


def test_old_and_damaged_shards_are_read_and_foreign_ones_left_alone_in_one_line(place: Path, reference: dict) -> None:
    folders = {name: spoiled(place, f"spoiled{i}", change) for i, (name, (change, *_)) in enumerate({**READ, **PASSED}.items())}
    before = {name: next(folder.iterdir()).read_bytes() for name, folder in folders.items()}
    outcomes = dict(zip(folders, play(place, [run(place, f.parent.name) for f in folders.values()]), strict=True))
    for name, (_, remade, words) in READ.items():
        out = outcomes[name]
        assert out["codes"] == [0], (name, out["text"])
        fresh = next(iter(set(folders[name].glob("records-*")) - {folders[name] / "records-other-1-abcdef.jsonl"}), None)
        assert (len(fresh.read_text().splitlines()) if fresh else 0) == remade, name
        assert words in out["text"], name
        assert load_records(folders[name]).records and len(load_records(folders[name])) == RECORDS, name
    for name, (_, words) in PASSED.items():
        out, shard = outcomes[name], folders[name] / "records-other-1-abcdef.jsonl"
        assert out["codes"] == [0] and len(load_records(folders[name])) == RECORDS, (name, out["text"])
        named = [line for line in out["text"].splitlines() if f"{shard.name}:1 " in line]
        assert len(named) == 1 and words in named[0], (name, out["text"])
        assert shard.read_bytes() == before[name], "what is not ours stays as it is"


@pytest.mark.slow
def test_the_command_itself_killed_watched_resumed_and_verified(tmp_path: Path) -> None:
    tiny = [
        "model=tiny_llama",
        "corpus=stdlib",
        "task.lengths=[400]",
        "task.per_cell=1",
        "limit=5",
        "compress=sink_h2o_int8",
        "memory_limit=2MiB",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    going = subprocess.Popen([sys.executable, "-m", "harness", *tiny], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)

    def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return started(f"harness.{name}", arguments, tmp_path, {"PYTHONPATH": str(ROOT)})

    while going.poll() is None and not any(p.read_bytes().count(b"\n") for p in tmp_path.glob("results/*/records-*.jsonl")):
        time.sleep(0.01)
    going.send_signal(signal.SIGSTOP)
    seen = tool("status", "results").stdout
    assert "1 writer at work" in seen and "left" in seen and " 0 missing" not in seen, seen
    going.kill()
    assert going.communicate()[1].count("rec") and "examples" in seen
    folder = next((tmp_path / "results").iterdir())
    before = len(load_records(folder))
    assert 0 < before < 25 and f"{25 - before} missing; nobody at work" in tool("status", str(folder)).stdout
    out = harness(*tiny, "progress=false", cwd=tmp_path)
    assert out.returncode == 0 and "25 ok, 0 failed" in out.stdout, out.stderr
    records = load_records(folder)
    assert len(records) == 25 and records.duplicates == 0
    good = tool("verify", str(folder), "--sample", "6")
    assert (good.returncode, good.stdout.strip()) == (0, "6 equal, 0 differing"), good.stderr
    for shard in folder.glob("records-*.jsonl"):
        lines = [json.loads(line) for line in shard.read_text().splitlines()]
        shard.write_text("".join(json.dumps(r | {"output": "made up", "tokens_kept": 1.0}) + "\n" for r in lines))
    bad = tool("verify", str(folder), "--sample", "3")
    assert bad.returncode == 1 and bad.stdout.strip().endswith("0 equal, 3 differing")
    assert "output was 'made up', now" in bad.stdout
