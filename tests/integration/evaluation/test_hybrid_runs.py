"""A hybrid through the command: questions, a second question, streams and lm-eval, with states counted and the reach said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import lm_eval_tasks
from tests.support.hybrids import HYBRIDS
from tests.support.lm_eval_tasks import CHOICE, TEXT
from tests.support.running import VOCABULARY, on_disk, run

QUICK = ("qwen3_next",)
FAMILIES = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in HYBRIDS]
STACK = "stacks=[sink_h2o_int8]"
NEEDLE = ("task=needle", "task.lengths=[520]", "task.depths=[0.5]", "task.per_cell=1", "task.max_new_tokens=9")


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it loads
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_task_runs_and_counts_states(family: str, tmp_path: Path) -> None:
    settings = HYBRIDS[family]()
    settings.vocab_size = VOCABULARY
    model = on_disk(tmp_path / family, settings)
    local = f"task.include_path={lm_eval_tasks.write(tmp_path / 'tasks', 1)}"
    tasks: dict[str, tuple[str, ...]] = {
        "second question": (*NEEDLE, "task.questions=2", "limit=2"),  # the first of which is asked as a single one is
        "stream": ("task=stream", "task.tokens=160", "task.documents=2"),
        "lm-eval": ("task=lm_eval", f"task.name=[{CHOICE},{TEXT}]", local, "limit=1"),
    }
    if family in QUICK:
        tasks["needle"] = (*NEEDLE, "limit=1")
    for name, overrides in tasks.items():
        page = family in QUICK or name == "second question"  # the page of another task sees nothing of a family
        records = run(tmp_path / name.replace(" ", "_"), *model, STACK, *overrides, page=page)
        assert {record["stack"] for record in records} == {"full", "sink_h2o_int8"}
        assert {record["status"] for record in records} == {"ok"}, [record["error"] for record in records]
        states = {record["bytes"]["allocated"]["recurrent"] for record in records}
        assert len(states) == 1 and states.pop() > 0, "the same in every arm and in the base"
        assert all(0 < record["reach"] < 1 for record in records)
