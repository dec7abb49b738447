"""`python -m harness.recommend`: from the records of runs to one setting, or to what is missing for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.notebook import evaluate
from harness.recommend import main
from tests.support.hostile import manifest
from tests.support.record_factory import ROW, make

INT8 = {"_target_": "harness.stages.stack.Stack", "keys": {"_target_": "harness.stages.codec.int8.Int8"}}


def written(folder: Path, losses: dict[str, list[int]], **more: Any) -> Path:
    """A run of one full cache that is always right, and stacks that lose these units; 500 bytes fewer for each."""
    folder.mkdir(parents=True)
    records = []
    for i in range(max(map(len, losses.values()))):
        unit = {"example_id": f"e{i}", "group_id": f"g{i}"} | more
        records.append(make(**unit))
        for k, (stack, lost) in enumerate(losses.items()):
            config = {"keep": None, "keys": stack}
            sizes = {"kv_bytes_context": (1000 - 500 - 10 * k) * ROW}
            info = {role: {"codec": stack} for role in ("keys", "values")}
            row = {"stack": stack, "stack_config": config, "score": 1.0 - lost[i], "codec_info": info, **sizes}
            records.append(make(**unit, **row))
    (folder / "records-a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "manifests").mkdir()
    task = {"_target_": "tasks.needle.Needle", "lengths": [1024], "per_cell": 4}
    command = ["task=needle", "stacks=[int8]", "task.per_cell=4"]
    about = manifest(command=command, config={"task": task})
    (folder / "manifests" / "20260101T000000Z-a.json").write_text(json.dumps(about))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(one) for one in arguments]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_a_guarantee_holds_with_enough_units_and_names_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", {"int8": [0] * 160})
    text = said(capsys, run, "--max-loss", "0.02")
    assert "int8: " in text
    assert "at most 0.02 of units lose an answer, with confidence 0.95 (0 of 160 did)" in text
    assert "LMDeploy: --quant-policy 8" in text


def test_with_fewer_units_it_says_how_many_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", {"int8": [0] * 40})
    text = said(capsys, run, "--max-loss", "0.02")
    assert "no guarantee" in text
    assert "149 units like these would settle it" in text
    assert "python -m harness task=needle 'stacks=[int8]' task.per_cell=15 limit=null" in text


def test_after_looking_only_anytime_valid_p_values_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """155 units without a loss are enough for a fixed number, and too few where the number was chosen while looking."""
    assert "with confidence" in said(capsys, written(tmp_path / "fixed", {"int8": [0] * 155}), "--max-loss", "0.02")
    peeked = written(tmp_path / "auto", {"int8": [0] * 155}, adaptive=True)
    assert "no guarantee" in said(capsys, peeked, "--max-loss", "0.02")


def test_several_tasks_are_answered_one_by_one_and_jointly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = written(tmp_path / "a", {"int8": [0] * 200, "int4": [0] * 200})
    lost = np.zeros(200, dtype=int)
    lost[:9] = 1
    other = written(tmp_path / "b", {"int8": [0] * 200, "int4": lost.tolist()}, run_id="smollm2-docqa-1", task="docqa")
    text = said(capsys, good, other, "--max-loss", "0.02")
    assert "int4: " in text.split("docqa")[0]
    assert text.splitlines()[-1].startswith("  int8: at most 0.02 of units lose an answer on each of them")


def test_what_is_not_possible_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", {"int8": [0] * 10})
    assert "--budget" in said(capsys, run, code=2)
    assert "--max-loss=2.0 is not possible" in said(capsys, run, "--max-loss", "2", code=2)
    costs = written(tmp_path / "cost", {"int8": [0] * 10}, higher_is_better=False, aggregate="exp_weighted")
    assert "no guarantee: a loss of this score" in said(capsys, costs, "--max-loss", "0.1")
    assert "no quality evidence at 8000 tokens" in said(capsys, run, "--max-loss", "0.1", "--seq", "8000")


def test_a_memory_limit_chooses_by_planned_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run on the small model: at a greater length, int8 fits under 60 % of the full cache and nothing dearer does."""
    made = evaluate(
        model="tiny_llama", stacks=["int8", "int4"], limit=2, results_dir=str(tmp_path), **{"task.lengths": [512]}
    )  # fmt: skip
    full = 700 * 4 * 2 * 2 * 64 * 2  # tokens, layers, KV heads, K and V, channels, bytes
    text = said(capsys, made.folder, "--seq", 700, "--budget", int(0.6 * full * 3), "--batch", 3)
    assert "int8: " in text or "int4: " in text
    assert "chosen by its score" in text
    assert "nothing that was measured fits" in said(capsys, made.folder, "--seq", 700, "--budget", int(0.1 * full))
