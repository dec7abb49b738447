"""Families with learned sinks, soft caps, chunks or position biases on disk: needle with a second question, streams and lm-eval, as users
run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.lm_eval.encoding import Window
from tests.support import conf_tree
from tests.support.asking import windows
from tests.support.running import VOCABULARY, on_disk, run
from tests.support.softmax_models import FAMILIES, engine, make
from tests.support.tiny_models import ids

NEEDLE = ("task=needle", "task.lengths=[300]", "task.per_cell=1", "task.questions=2", "task.max_new_tokens=10", "limit=2")
STREAM = ("task=stream", "task.tokens=120", "task.documents=1")


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("gemma2", marks=pytest.mark.slow), "llama4", "bloom"])
def test_every_task_runs(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name].config(vocab_size=VOCABULARY)
    here = on_disk(tmp_path / "model", config, make(config, "eager"))
    point = "'compress.points=[{keep.budget.value: 0.5}]'"
    for task, names in ((NEEDLE, ("snapkv", "h2o")), (STREAM, ("streaming", "h2o"))):
        stacks = ",".join(f"[{name},{point}]" for name in names)
        found = run(tmp_path / "out", *here, *task, f"stacks=[{stacks}]")
        assert {r["stack"] for r in found} == {"full", *names}
        assert {r["status"] for r in found} == {"ok"}, [r["error"] for r in found]
        assert all(r["kv_bytes_context"] < r["kv_bytes_full"] for r in found if r["stack"] != "full")


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4", "bloom"])
def test_lm_evals_windows_are_scored(name: str) -> None:
    text = Window(tuple(ids(80)), 79)
    full, evicted = windows(
        engine(name), [text], [conf_tree.stack("full"), conf_tree.stack("streaming", "keep.budget.value=0.5")]
    )
    assert (full.status, evicted.status) == ("ok", "ok"), evicted.error
    assert evicted.exercised > 0 and evicted.responses != full.responses
