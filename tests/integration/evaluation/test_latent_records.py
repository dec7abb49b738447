"""Models with latent attention through the command: needles with a second question, a stream, lm-eval tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from harness.configure import arms
from tests.integration.commands.test_command import records
from tests.integration.kv.test_families import directory
from tests.support import composed_once, lm_eval_tasks
from tests.support.forked import child
from tests.support.latent_models import D_C, D_R, FAMILIES
from tests.support.lm_eval_tasks import ANSWER, CHOICE, TEXT
from tests.support.running import composed
from tests.support.tiny_models import build

HALF = "'compress.points=[{keep.budget.value: 0.5}]'"
STACKS = f"stacks=[[sink_h2o_int8,{HALF}],int4,[snapkv,{HALF}],[streaming_cache,{HALF}]]"
TOKEN = (D_C + D_R) * 2  # bytes of a token and layer, bf16
FIRST = "minicpm3" if "minicpm3" in FAMILIES else "youtu"
OTHER_TASKS = (FIRST, "deepseek_v3, halves")  # streams and lm-eval see of a family its engine alone, tested by itself for each


@pytest.fixture(scope="module", autouse=True)
def _stacks() -> Iterator[None]:
    """The runs are forks of this process: what it has composed they have."""
    with mock.patch.object(arms, "compose_stack", composed_once.compose_stack):
        with composed(STACKS) as config:
            arms.arms_of(config, [STACKS])
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_eval_tasks.write(tmp_path_factory.mktemp("local_tasks"), 2)


def run(where: Path, *arguments: str) -> list[dict]:
    """Records of a command that ends well."""
    results, log = where / "results", where / "log"
    model = ("model=local", f"model.path={where / 'model'}", "model.tokenizer=bytes", "corpus=stdlib", "progress=false")
    known = set(results.glob("*"))
    pid = child({"arguments": [*model, f"results_dir={results}", STACKS, *arguments]}, log)
    _, status = os.waitpid(pid, 0)
    assert status == 0, log.read_text()
    (folder,) = set(results.glob("*")) - known
    return records(folder)


@pytest.mark.parametrize("name", [n if n == FIRST else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_every_kind_of_task_runs(name: str, tmp_path: Path, tasks: Path) -> None:
    config = FAMILIES[name]()
    config.vocab_size = 258
    directory(tmp_path / "model", build(config, "sdpa"), config)
    layers = config.num_hidden_layers
    cell = ("task.lengths=[300]", "task.depths=[0.5]", "task.per_cell=1")
    asked = run(tmp_path, "task=needle", *cell, "task.questions=2", "task.max_new_tokens=8", "limit=2")
    made = [asked]
    if name in OTHER_TASKS:
        made.append(run(tmp_path, "task=stream", "task.tokens=160", "task.documents=1", "task.context=64"))
        names = ",".join((CHOICE, TEXT, ANSWER))
        made.append(run(tmp_path, "task=lm_eval", f"task.name=[{names}]", f"task.include_path={tasks}", "limit=1"))
    for found in made:
        assert {r["status"] for r in found} == {"ok"}, [r["error"] for r in found]
        assert len({r["stack"] for r in found}) == 5
    full = [r for r in asked if r["stack"] == "full"]
    assert {r["order"] for r in asked} == {1, 2}
    for r in full:
        assert r["kv_bytes_context"] == r["kv_bytes_full"] == r["tokens_seen"] * layers * TOKEN
    for r in asked:
        if r["stack"] != "full":
            assert r["kv_bytes_context"] < r["kv_bytes_full"] and r["entries_touched"] > 0
    (int4,) = {r["codec_info"]["values"]["holds"] for r in asked if r["stack"] == "int4"}
    assert int4.startswith("latent")
