"""Models whose last layers read another layer's store through the command: questions, a second question, streams and lm-eval."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.families.tiny import build, tiny_config
from tests.support import lm_eval_tasks
from tests.support.lm_eval_tasks import CHOICE, TEXT
from tests.support.running import VOCABULARY, on_disk, run

NEEDLE = ("task=needle", "task.lengths=[300]", "task.per_cell=1", "task.questions=2", "task.max_new_tokens=8", "limit=2")
STREAM = ("task=stream", "task.tokens=160", "task.documents=2")
STACKS = "stacks=[[sink_h2o_int8,'compress.points=[{keep.budget.value: 0.5}]']]"


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it loads
@pytest.mark.parametrize("family", ["gemma3n_text", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_every_kind_of_task_runs(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.vocab_size = VOCABULARY
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = VOCABULARY
    model = on_disk(tmp_path / "model", config, build(config, "sdpa"))
    local = f"task.include_path={lm_eval_tasks.write(tmp_path / 'tasks', 1)}"
    for overrides in (NEEDLE, STREAM, ("task=lm_eval", f"task.name=[{CHOICE},{TEXT}]", local, "limit=1")):
        records = run(tmp_path / "results", *model, STACKS, *overrides)
        assert {record["stack"] for record in records} == {"full", "sink_h2o_int8"}
        assert {record["status"] for record in records} == {"ok"}, [record["error"] for record in records]
        if overrides is NEEDLE:
            assert {record["order"] for record in records} == {1, 2}
            assert all(r["kv_bytes_context"] < r["kv_bytes_full"] for r in records if r["stack"] != "full")
