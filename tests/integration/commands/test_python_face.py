"""From Python the same configuration gives the same records, and a compressed context answers as a run does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from tests.support.running import run

SHORT = {"task.lengths": [400], "task.per_cell": 1, "limit": 2}
TEXT = "Ann lives in Rome and Bob lives in Paris; both write letters every day of the week. " * 6


@dataclass(frozen=True)
class Middle(harness.Scorer):
    """Values near the middle of the text stay."""

    def score(self, view: harness.LayerView) -> torch.Tensor:
        return -(view.pos_HN - view.seen / 2).abs().float()


@dataclass(frozen=True)
class Count:
    """Asks how often a word is in a text."""

    word: str = "Ann"
    name = "count"
    metric = "exact"
    chance = 0.0
    query_aware = False
    chat = False
    needs_corpus = False

    def examples(self, tokens: Any, corpus: Any, seed: int) -> list[harness.Example]:
        return [
            harness.Example(
                id=f"e{i}", context=TEXT * i, question=f" How often {self.word}?", answer_prefix="", answers=(str(i),)
            )
            for i in (1, 2)
        ]

    def score(self, example: harness.Example, answer: str) -> harness.Score:
        return harness.Score(value=float(answer.strip() in example.answers))


def test_the_same_configuration_has_the_same_records_as_the_command(tmp_path: Path) -> None:
    asked = ["model=tiny_llama", "stacks=[int8,snapkv]", "task.lengths=[400]", "task.per_cell=1", "limit=2"]
    theirs = {record["key"]: record for record in run(tmp_path, *asked)}
    shards = {path.name: path.stat().st_size for path in tmp_path.rglob("records-*.jsonl")}
    mine = harness.evaluate(
        model="tiny_llama", stacks=["int8", "snapkv"], corpus="stdlib", progress=False, results_dir=tmp_path, **SHORT
    )
    assert {record["key"] for record in mine.records} == mine.keys == set(theirs)
    assert {path.name: path.stat().st_size for path in tmp_path.rglob("records-*.jsonl")} == shards, "nothing was made again"
    assert set(mine.points["stack"]) == {"full", "int8", "snapkv"} and "on_frontier" in mine.points
    assert {"full", "int8", "snapkv"} <= {trace.name for trace in mine.frontier().data}
    assert str(mine).endswith(str(mine.folder)) and "0 failed" in str(mine)


def test_an_own_scorer_and_an_own_task_are_evaluated(tmp_path: Path) -> None:
    stacks = {
        "middle": [
            harness.Stack(keep=harness.Keep(scorer=Middle(), sinks=4, budget=harness.Budget(value=v))) for v in (0.3, 0.6)
        ]
    }
    done = harness.evaluate(model="tiny_llama", stacks=stacks, task=Count(), progress=False, results_dir=tmp_path)
    assert {record["status"] for record in done.records} == {"ok"} and not done.failures
    assert done.folder.name.startswith("tiny_llama-count-")
    kept = {
        r["point"]["keep.budget.value"]: r["tokens_kept"] / r["tokens_seen"] for r in done.records if r["stack"] == "middle"
    }
    assert kept == pytest.approx({0.3: 0.3, 0.6: 0.6}, abs=0.01)
    other = harness.evaluate(model="tiny_llama", stacks=stacks, task=Count(word="Bob"), progress=False, results_dir=tmp_path)
    assert other.folder != done.folder, "another task is another run"
    with pytest.raises(harness.UserError, match="set it where the object is made"):
        harness.evaluate(model="tiny_llama", task=Count(), task__word="Bob")
    with pytest.raises(harness.UserError, match="an object with name, metric"):
        harness.evaluate(model="tiny_llama", task=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("stack", ["full", "int4", "snapkv", "h2o", "h2o_chunked", "random"])
def test_a_compressed_context_answers_as_a_run_does(stack: str, tmp_path: Path) -> None:
    question = " Where does Ann live?"
    (tmp_path / "q.jsonl").write_text(json.dumps({"context": TEXT, "question": question, "answers": ["Rome"]}))
    change = {} if stack in ("full", "int4") else {"keep__budget__value": 0.5}
    own = [f"compress.{key.replace('__', '.')}={value}" for key, value in change.items()]
    done = harness.evaluate(
        model="tiny_llama",
        stacks=[[stack, *own] if own else stack],
        task="jsonl",
        task__path=tmp_path / "q.jsonl",
        task__max_new_tokens=12,
        results_dir=tmp_path / "r",
        progress=False,
    )
    (record,) = [r for r in done.records if (r["stack"] == "full") == (stack == "full")]
    cache = harness.load("tiny_llama").cache(TEXT, stack=stack, **change)
    assert cache.ask(question, max_new_tokens=12) == record["output"]
    assert cache.bytes == record["kv_bytes_context"] and cache.full_bytes == record["kv_bytes_full"]


def test_a_store_is_unchanged_by_what_is_asked() -> None:
    cache = harness.load("tiny_llama").cache(
        TEXT, stack=harness.Stack(keep=harness.Keep(scorer=Middle(), budget=harness.Budget(value=0.5)), phase="always")
    )
    before, kept = cache.bytes, cache.kept_positions
    answers = [
        cache.ask(" Who?", max_new_tokens=8),
        cache.ask(" Where is Bob?", max_new_tokens=8),
        cache.ask(" Who?", max_new_tokens=8),
    ]
    assert answers[0] == answers[2]
    assert cache.bytes == before < cache.full_bytes
    assert len(kept) == 4 and len(kept[0]) == 2
    assert all(
        torch.equal(a, b) for one, two in zip(kept, cache.kept_positions, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_what_cannot_be_asked_is_one_line() -> None:
    lm = harness.load("tiny_llama")
    with pytest.raises(harness.UserError, match=r"stack='snapkv' has 4 budgets: choose one, such as keep__budget__value=0\.1"):
        lm.cache(TEXT, stack="snapkv")
    with pytest.raises(harness.UserError, match="taken as it is"):
        lm.cache(TEXT, stack=harness.Stack(), keep__sinks=3)
    with pytest.raises(harness.UserError, match="question="):
        lm.cache(TEXT).ask("")
    with pytest.raises(harness.UserError, match="context="):
        lm.cache("")
