"""Choices are rows of their own under a memory limit, and lots are drawn from the compressed tokens alone, whoever asks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine.batches import MOST_TOGETHER
from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.engine.scheduler import Scheduler
from harness.lm_eval import model as lm_eval_model
from harness.lm_eval.encoding import LmEvalRequest, Window
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import document, results
from tests.support.lm_eval_tasks import ANSWER, CHOICE, TEXT, write
from tests.support.running import run
from tests.support.tiny_models import ids

RANDOM = Stack(keep=conf_tree.keep("random", 12), phase="prefill")


class Noting(Engine):
    """Notes how many rows were scored at once."""

    def score(self, rows: Sequence[Any], *more: Any) -> list[Any]:
        self.most = max(getattr(self, "most", 0), len(rows))
        return super().score(rows, *more)


def served(engine: Engine, jobs: list[Question[Any]], limit: int) -> list[Result[Any]]:
    return results(engine, jobs, limit)


def test_every_choice_is_a_row_under_the_limit() -> None:
    """The kind: a request that forks into several rows once counted as one."""
    engine = Noting(tiny_models.tiny("llama"), torch.float32)
    choices = tuple((5 + i, 6, 7) for i in range(8))
    jobs = [Question(owner=i, prefix=tuple(ids(40, seed=i)), stack=Stack(), held=(5,), targets=choices) for i in range(6)]
    server = Scheduler(engine, 1 << 40)
    one = replaced(jobs[0], choices[:1])
    single, all_eight = (server.size(job)[1] for job in (one, jobs[0]))
    assert all_eight == 8 * single, "a store and the logits of each choice"
    base = server.forecast.prefix(40)
    assert {s.status for s in served(engine, jobs, base + 2 * (all_eight + base) + single)} == {"ok"}
    assert engine.most <= 16
    (failed, *_) = served(engine, jobs[:1], base + all_eight - 1)
    assert failed.status == "failed" and "memory_limit" in str(failed.error)


def test_a_wave_has_no_more_rows_than_forks_allow() -> None:
    engine = Noting(tiny_models.tiny("llama"), torch.float32)
    choices = tuple((5 + i, 6) for i in range(20))
    jobs = [Question(owner=i, prefix=tuple(ids(20, seed=i)), stack=Stack(), held=(5,), targets=choices) for i in range(5)]
    assert len(served(engine, jobs, 1 << 40)) == 5
    assert engine.most == 2 * 20 <= MOST_TOGETHER


def replaced(job: Question[Any], targets: tuple[tuple[int, ...], ...]) -> Question[Any]:
    return dataclasses.replace(job, targets=targets)


def test_lots_follow_the_compressed_tokens_whatever_else_a_document_asks() -> None:
    """The kind: the seed of a draw came from the whole prompt of a document, and from others on another way in."""
    engine = tiny_models.engine("llama")
    context, text = tuple(ids(40)), tuple(ids(90, seed=2))
    one = LmEvalRequest(kind="loglikelihood", ids=context, target=(5, 6))
    longer = LmEvalRequest(kind="loglikelihood", ids=tuple(ids(60, seed=1)), target=(7,))
    whole = LmEvalRequest(kind="loglikelihood_rolling", windows=(Window(text, 89),))
    answers: list[Any] = []
    for requests in ((one,), (one, longer), (longer, one), (whole,), (whole, longer)):
        (reply,) = document(engine, requests, [RANDOM])
        assert reply.status == "ok", reply.error
        answers.append(reply.responses[requests.index(one if one in requests else whole)])
    for same in (answers[:3], answers[3:]):
        logp = [one[0] if isinstance(one, tuple) else one for one in same]
        assert logp == pytest.approx([logp[0]] * len(logp), abs=1e-4)


@pytest.mark.parametrize("name", [CHOICE, TEXT, ANSWER])
def test_a_random_policy_answers_the_same_as_under_lm_evals_own_command(name: str, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = write(tmp_path / "tasks", 3)
    points = "compress.points=[{keep.budget.value: 0.25}]"
    how = ("model=tiny_llama", "model.device=cpu", "task=lm_eval", f"task.name={name}", f"task.include_path={folder}")
    found = run(tmp_path / "out", *how, "compress=random", points, "limit=2")
    mine = sorted((r for r in found if r["stack"] == "random"), key=lambda r: str(r["example_id"]))
    model = lm_eval_model.KvHarness(model="tiny_llama", compress="random", budget=0.25, **{"model.device": "cpu"})
    theirs = simple_evaluate(
        model=model,
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),  # finding its own takes seconds
        limit=2,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    samples = {sample["doc_id"]: sample["resps"] for sample in theirs["samples"][name]}  # one for each filter
    said = [[reply for (reply,) in samples[number]] for number in sorted(samples)]
    assert len(said) == len(mine) == 2
    for record, replies in zip(mine, said, strict=True):
        plain = len(replies) == 1 and isinstance(replies[0], str)
        assert record["output"] == (replies[0] if plain else json.dumps(replies))
