"""Whose a record is: runs that share examples keep their own, and what is not a run's any more is named and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
import pytest
from omegaconf import OmegaConf

from harness.command import execute
from harness.configure.arms import arms_of
from harness.evaluation.assemble import assemble
from harness.evaluation.planned import Planned
from harness.records.current import current_records
from harness.records.progress import state
from harness.records.shards import load_records
from harness.records.store import Store
from harness.report import merge
from harness.verify import verify
from tests.support import lm_eval_tasks

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
TINY = ["model=tiny_llama", "corpus=stdlib", "progress=false"]
NEEDLE = ["task=needle", "task.lengths=[200]", "task.per_cell=1", "limit=2", "stacks=[int8]"]
STREAM = ["task=stream", "task.tokens=96", "task.documents=2", "stacks=[int8]"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*overrides: str) -> Path:
    given = [*TINY, *overrides]
    folder, failed = execute(hydra.compose("config", overrides=given), given)
    assert failed == 0
    return folder


def keys(*overrides: str) -> set[str]:
    given = [*TINY, *overrides]
    cfg = hydra.compose("config", overrides=given)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    bench = assemble(config, arms_of(cfg, given), weights=False)
    store: Store[Planned] = Store(Path("keys"))
    try:
        return {one.key for one in bench.planned(bench.runner(store))}
    finally:
        store.close()


def questions(*lines: dict[str, Any], name: str = "own.jsonl") -> list[str]:
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["task=jsonl", f"task.path={name}", "task.max_new_tokens=2", "stacks=[int8]"]


def line(number: int, answer: str = "red") -> dict[str, Any]:
    text = f"Door {number} is {answer}. " + "The hall is long and has many doors. " * 3
    return {"id": number, "context": text, "question": f"What colour is door {number}?", "answers": answer}


SETTINGS = {
    "stream": (STREAM, ["task.chunk=16", "task.context=24"]),
    "needle": (NEEDLE, ["task.metric=f1", "task.max_new_tokens=9", "task.stop=[x]", "task.query_aware=true"]),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_of_a_task_is_in_the_key(kind: str) -> None:
    """The kind: two records that differ in a setting of their task pass for one."""
    base, changes = SETTINGS[kind]
    found = [keys(*base)] + [keys(*base, change) for change in changes]
    assert len(set().union(*found)) == sum(map(len, found)) == len(found) * 4


def test_settings_of_lm_eval_tasks_are_in_the_key_too(tmp_path: Path) -> None:
    base = [
        "task=lm_eval",
        f"task.name={lm_eval_tasks.CLOZE}",
        f"task.include_path={lm_eval_tasks.write(tmp_path / 'tasks', 2)}",
    ]
    assert not keys(*base, "stacks=[int8]") & keys(*base, "stacks=[int8]", "task.truncate=left")


SHARED = {
    "chunk": [[*STREAM, "task.chunk=16"], [*STREAM, "task.chunk=32"]],
    "metric": [NEEDLE, [*NEEDLE, "task.metric=f1"]],
    "lengths": [["task=needle", "task.lengths=[200]", "task.depths=[0.5]", "stacks=[int8]"],
                ["task=needle", "task.lengths=[240,200]", "task.depths=[0.5]", "stacks=[int8]"]],
    "seeds": [[*NEEDLE, "seed=0"], [*NEEDLE, "seed=[0,1]"]],
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
def test_runs_that_share_examples_stand_side_by_side(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The kind: a record of one run takes the place of another run's, which loses examples or its full cache."""
    folders = [run(*overrides) for overrides in SHARED[kind]]
    alone = [pd.read_csv(folder / "points.csv") for folder in folders]
    assert len(set(folders)) == 2
    capsys.readouterr()
    merge(folders, Path("page.html"), against=["full"])
    shown = capsys.readouterr().out
    assert "earlier record" not in shown and "no comparison" not in shown
    together = pd.read_csv("contrasts.csv")
    assert together["run_id"].tolist() == [folder.name for folder in folders]
    assert together["reason"].isna().all()
    for contrast, own in zip(together.itertuples(), alone, strict=True):
        int8 = own[own["stack"] == "int8"].iloc[0]
        assert (contrast.n, contrast.n_shared, contrast.score) == (int8["n"], int8["n"], int8["score"])
        assert contrast.diff_to_against == int8["diff_to_full"]


def test_one_file_under_two_paths_is_two_runs() -> None:
    first = run(*questions(line(1), line(2), name="a.jsonl"))
    second = run(*questions(line(1), line(2), name="b.jsonl"))
    merge([first, second], Path("page.html"), against=["full"])
    assert pd.read_csv("contrasts.csv")["n_shared"].tolist() == [2, 2]


CHANGED = {
    "a line gone": ([line(1)], 2 * 1),
    "a context changed": ([line(1), line(2, "blue")], 2 * 1),
    "an answer changed": ([line(1), line(2) | {"answers": "many doors"}], 2 * 1),
    "all lines new": ([line(3), line(4)], 2 * 2),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_records_of_a_file_that_was_changed_are_named_and_left_out_everywhere(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind: table, points and page each have their own idea of what a run's records are."""
    lines, stale = CHANGED[kind]
    before = run(*questions(line(1), line(2)))
    capsys.readouterr()
    folder = run(*questions(*lines))
    assert folder == before
    shown = capsys.readouterr().out
    said = f"{folder}: {stale} stale record(s), of examples or a model that are not the same any more: left out everywhere"
    assert said in shown.splitlines()
    assert pd.read_csv(folder / "points.csv")["n_prompts"].tolist() == [len(lines)] * 2
    assert "more records of this run" not in shown
    assert len(load_records(folder)) == 4 + 2 * len(lines) - (4 - stale), "no record is lost"
    assert len(current_records(folder)[0]) == 2 * len(lines) == state(folder).total("ok")
    merge([folder], Path("page.html"))
    assert said in capsys.readouterr().out.splitlines()
    assert verify(folder).different == []
    run(*questions(line(1), line(2)))
    assert len(current_records(folder)[0]) == 4, "back in the file, they are the run's again"


def test_what_a_limit_or_another_stack_leaves_out_is_not_stale(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = questions(line(1), line(2), line(3))
    folder = run(*wanted)
    assert run(*wanted[:-1], "stacks=[int4]", "limit=1") == folder
    shown = capsys.readouterr().out
    assert "stale" not in shown and "5 more records of this run" in shown
    assert pd.read_csv(folder / "points.csv")["n_prompts"].tolist() == [3, 3, 1]


def test_records_and_manifests_that_do_not_say_what_they_are_of_stay(tmp_path: Path) -> None:
    folder = run(*questions(line(1), line(2)))
    for path in folder.glob("records-*.jsonl"):
        records = [json.loads(text) for text in path.read_text().splitlines()]
        assert all(len(record["sample_sha256"]) == 64 for record in records)
        path.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "sample_sha256"}) + "\n" for r in records))
    assert len(current_records(folder)[0]) == 4
    (manifest,) = (folder / "manifests").iterdir()
    for odd in ({}, [], {"0": "x"}, None):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"samples": odd}))
        assert len(current_records(folder)[0]) == 4
