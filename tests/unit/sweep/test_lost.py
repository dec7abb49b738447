"""What a dead process leaves unmade becomes failed records, without its weights, and the same command makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from harness.analysis.points import points
from harness.command import execute
from harness.configure.arms import arms_of
from harness.errors import UserError
from harness.evaluation.assemble import assemble
from harness.evaluation.planned import Planned
from harness.models.load import load
from harness.pages.outputs import write_all
from harness.records.progress import Snapshot, snapshot, state
from harness.records.shards import load_records
from harness.records.store import Store
from harness.sweep.lost import WHY, record_lost
from tests.support import lm_eval_tasks

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
STACKS = "stacks=[int8,[h2o,'compress.points=[{}]']]"
TASKS = {
    "questions": ["task=needle", "task.lengths=[200]"],
    "stream": ["task=stream", "task.tokens=96", "task.documents=2"],
    "lm_eval": ["task=lm_eval", f"task.name={lm_eval_tasks.CLOZE}"],
}


def composed(folder: Path, kind: str = "questions", stacks: str = STACKS) -> tuple[DictConfig, list[str]]:
    """A configuration of two examples, and its overrides."""
    overrides = ["model=tiny_llama", "corpus=stdlib", "limit=2", "progress=false", f"results_dir={folder}/results", stacks]
    overrides += TASKS[kind]
    if kind == "lm_eval":
        overrides.append(f"task.include_path={lm_eval_tasks.write(folder / 'tasks', 2)}")
    return hydra.compose("config", overrides=overrides), overrides


def lost(cfg: DictConfig, overrides: list[str], before: Snapshot = Snapshot(), printed: str = "") -> int:  # noqa: B008
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return record_lost(config, arms_of(cfg, overrides), "killed by SIGKILL", printed, before)


@pytest.mark.parametrize("kind", TASKS)
def test_all_that_is_missing_fails_and_the_same_command_makes_it(kind: str, tmp_path: Path) -> None:
    cfg, overrides = composed(tmp_path, kind)
    loaded = load.cache_info()
    assert lost(cfg, overrides, printed="x" * 9000 + "the end") == 6
    assert load.cache_info() == loaded, "no weights are read"
    folder = next((tmp_path / "results").iterdir())
    before = load_records(folder).records
    assert {r["status"] for r in before} == {"failed"} and {r["stack"] for r in before} == {"full", "int8", "h2o"}
    text, file = before[0]["error"].rsplit(" (", 1)
    assert text == f"{WHY}: killed by SIGKILL" and "\n" not in text
    assert (folder / file.rstrip(")")).read_text().endswith("the end")
    assert points(before)["n_failed"].tolist() == [2, 2, 2] and points(before)["n"].tolist() == [0, 0, 0]
    assert state(folder).total("failed") == 6, "the dead process had not written what it was asked for"

    where, failed = execute(cfg, overrides)
    assert (where, failed) == (folder, 0)
    after = {r["key"]: r for r in load_records(folder).records}
    assert set(after) == {r["key"] for r in before}
    assert {(r["status"], r["attempt"]) for r in after.values()} == {("ok", 2)}
    same = ["example_id", "prompt_sha256", "n_prompt", "task", "kv_dtype", "chunk"]
    same += [] if kind == "lm_eval" else ["metric", "higher_is_better", "aggregate"]  # which lm-eval tells with an answer
    assert all(r[name] == after[r["key"]][name] for r in before for name in same)
    assert lost(cfg, overrides) == 0, "nothing is missing"


def test_the_same_lm_eval_records_wherever_the_models_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval tells its tasks the folder of the tokenizer and of their own file: neither is what a record depends on."""
    cfg, overrides = composed(tmp_path, "lm_eval")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    keys = []
    for cache in ("one", "other"):
        monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / cache))
        bench = assemble(config, arms_of(cfg, overrides), weights=False)
        assert str(tmp_path / cache) in str(bench.lm.tokens.hf.name_or_path)
        store: Store[Planned] = Store(tmp_path / "records")
        keys.append([one.key for one in bench.planned(bench.runner(store))])
        store.close()
    assert len(keys[0]) == 6 and keys[0] == keys[1]


def test_what_others_hold_and_what_has_already_failed_is_left_alone(tmp_path: Path) -> None:
    cfg, overrides = composed(tmp_path)
    began = Snapshot()
    assert lost(cfg, overrides, began) == 6
    assert lost(cfg, overrides, began) == 0, "recorded once a sweep"
    folder = next((tmp_path / "results").iterdir())
    assert not (folder / "failures").exists(), "there is nothing to put there"
    assert write_all(folder).points["n_failed"].sum() == 6, "a run of failures alone has a report"
    other: Store[Planned] = Store(folder)
    assert other.claims.take(claims_of(cfg, overrides)[0])
    assert lost(cfg, overrides, snapshot(folder)) == 3, "one of two contexts is being worked on"
    other.close()


def test_calibrated_codecs_need_their_limits_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    cfg, overrides = composed(tmp_path, stacks="stacks=[int8_static]")
    with pytest.raises(UserError, match="not measured yet"):
        lost(cfg, overrides)
    assert execute(cfg, overrides)[1] == 0
    assert lost(cfg, overrides) == 0, "the same keys, from the limits that the run left"


def claims_of(cfg: DictConfig, overrides: list[str]) -> list[str]:
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    found = arms_of(cfg, overrides)
    bench = assemble(config, found, weights=False)
    store: Store[Planned] = Store(Path(config["results_dir"]) / bench.setup.run_id)
    planned = bench.planned(bench.runner(store))
    store.close()
    return [one.claim for one in planned]
