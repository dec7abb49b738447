"""What was read is what counts: an answer or a text that never met a compressed store is not exercised, however it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engine.requests import Question
from harness.lm_eval.encoding import Window
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results, windows
from tests.support.running import run
from tests.support.tiny_models import ids

TINY = ("model=tiny_llama", "model.device=cpu")
STREAM = (*TINY, "task=stream", "task.tokens=512", "task.documents=1", "stacks=[int1,window,streaming]")


def by_stack(found: list[dict]) -> dict[str, list[dict]]:
    return {name: [r for r in found if r["stack"] == name] for name in ("full", "int1", "window", "streaming")}


def test_a_stream_of_one_chunk_compresses_nothing_that_is_read(tmp_path: Path) -> None:
    """Found by: all stacks equal to the full cache, KL 0, on the front at a tenth of its bytes."""
    found = by_stack(run(tmp_path, *STREAM, "task.chunk=512"))
    assert {(r["status"], r["compressed_share"]) for r in found["full"]} == {("ok", None)}
    for name in ("int1", "window", "streaming"):
        assert {(r["status"], r["compressed_share"]) for r in found[name]} == {("not_exercised", 0.0)}
        assert all(r["entries_touched"] > 0 and "before the last token was scored" in r["error"] for r in found[name])


def test_the_share_of_scored_tokens_that_read_a_compressed_store(tmp_path: Path) -> None:
    found = by_stack(run(tmp_path, *STREAM, "task.chunk=128"))
    tokens = 511  # 512 ids, each but the first is scored; the first chunk reads an empty store
    assert {(r["status"], r["compressed_share"]) for r in found["int1"]} == {("ok", (tokens - 128) / tokens)}
    for name in ("window", "streaming"):
        shares = {r["point"]["keep.budget.value"]: (r["status"], r["compressed_share"]) for r in found[name]}
        assert len(shares) == 4
        for budget, (status, share) in shares.items():
            chunks = next(n for n in range(1, 5) if 128 * n > -(-512 * budget // 1))  # read until the budget is passed
            assert share == max(tokens - 128 * chunks, 0) / tokens
            assert status == ("ok" if share else "not_exercised")


@pytest.mark.parametrize(("fed", "new", "exercised"), [(4, 20, True), (4, 6, False), (12, 1, False), (12, 2, True)])
def test_evicted_while_answering_counts_once_a_token_read_it(fed: int, new: int, exercised: bool) -> None:
    """The kind: a context that a stack keeps whole says nothing of what happens by the end of the answer.

    30 tokens of context under a budget of 40: rows go once more than 40 were fed, and the next token reads what is left.
    """
    stack = Stack(keep=conf_tree.keep("h2o", 40), phase="always")
    job = Question(owner=None, prefix=tuple(ids(30)), stack=stack, held=tuple(ids(fed, seed=1)), max_new=new)
    served = results(tiny_models.engine("llama"), [job])
    (one,) = served
    assert one.row is not None and one.row.touched() == 0
    assert (one.touched > 0) == exercised == (one.entries > 0)


def test_an_answer_that_met_evictions_is_ok(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"context": "word " * 20, "question": "Which word?", "answers": ["word"]}) + "\n")
    budget = "compress.points=[{keep.budget.unit: tokens, keep.budget.value: 140}]"
    asked = (*TINY, "task=jsonl", f"task.path={mine}", "compress=h2o", budget)
    (_, long_answer) = run(tmp_path / "long", *asked, "task.max_new_tokens=80")
    (_, no_answer) = run(tmp_path / "short", *asked, "task.max_new_tokens=4")
    assert (long_answer["status"], long_answer["error"]) == ("ok", None) and long_answer["entries_touched"] > 0
    assert (no_answer["status"], no_answer["entries_touched"]) == ("not_exercised", 0)
    assert long_answer["tokens_kept"] == long_answer["tokens_seen"], "after the context all were there"


def test_targets_are_read_before_their_own_eviction() -> None:
    stack = Stack(keep=conf_tree.keep("h2o", 40), phase="always")
    job = Question(owner=None, prefix=tuple(ids(30)), stack=stack, held=(5,), targets=(tuple(ids(20)),))
    served = results(tiny_models.engine("llama"), [job])
    assert served[0].final.touched() > 0 == served[0].touched


def test_a_windows_share_counts_what_was_read() -> None:
    engine = tiny_models.engine("llama")
    stacks = [Stack(keep=conf_tree.keep("h2o", budget), phase="always") for budget in (20, 100, 160)]
    found = windows(engine, [Window(tuple(ids(161)), 160)], stacks)
    # The first 80 are read exactly; the rest in chunks of 32, and the 100 are passed by the first of them.
    assert [(one.scored, one.exercised) for one in found] == [(160, 80), (160, 48), (160, 0)]
