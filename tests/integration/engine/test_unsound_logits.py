"""Logits that are no distribution fail the request that has them, on every path; entries at minus infinity do not."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig

from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND, divergence, sound
from harness.engine.requests import Question
from harness.engine.streams import Reading, read
from harness.kv.attention import NAME
from harness.lm_eval.encoding import Window
from harness.stages.stack import Stack
from tests.support import lm_eval_tasks
from tests.support.asking import owned, windows
from tests.support.running import VOCABULARY, on_disk, run
from tests.support.tiny_models import SHAPE, build, config, ids

POISON = 1  # a token whose embedding is NaN; `ids` never draws it
INF = float("inf")
STACKS = "stacks=[int8,[window,'compress.points=[{keep.budget.value: 0.5}]']]"


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = copy.deepcopy(build(config("llama"), NAME))
    model.get_input_embeddings().weight.data[POISON] = math.nan
    return Engine(model, torch.float32)


def test_what_is_a_distribution() -> None:
    rows = [[1.0, math.nan], [-INF, -INF], [1.0, INF], [1.0, -INF], [0.0, 1.0]]
    assert sound(torch.tensor(rows)).tolist() == [False, False, False, True, True]
    assert sound(torch.tensor(rows, dtype=torch.float16)).tolist() == [False, False, False, True, True]


def test_divergence_is_over_what_the_reference_makes_possible() -> None:
    p, q = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1), torch.tensor([[1.0, 1.0, 0.0]]).log_softmax(-1)
    plain = float((p.exp() * (p - q)).sum())
    never = torch.full((1, 20), -INF)
    assert float(divergence(torch.cat((p, never), 1), torch.cat((q, never), 1))) == pytest.approx(plain, rel=1e-6)
    assert float(divergence(p, torch.tensor([[-INF, 0.0, 0.0]]).log_softmax(-1))) == INF


@pytest.mark.parametrize("targets", [(), ((5, 6, 7), (8, 9))])
def test_only_the_request_that_has_them_fails(engine: Engine, targets: tuple) -> None:
    """The kind: NaN once gave token 0 again and again, or a choice, and the record was ok."""

    def job(name: str, *held: int) -> Question[Any]:
        return Question(
            owner=name, prefix=tuple(ids(30)), stack=Stack(), held=held, max_new=0 if targets else 6, targets=targets
        )

    jobs = [job("before", 5, 6), job("poisoned", 5, POISON), job("after", 7, 8)]
    found = owned(engine, jobs)
    assert {name: one.status for name, one in found.items()} == {"before": "ok", "poisoned": "failed", "after": "ok"}
    assert found["poisoned"].error == UNSOUND


def test_a_stream_and_a_window_know_them(engine: Engine) -> None:
    text, poisoned = ids(100), ids(100, seed=1)
    poisoned[90] = POISON
    readings = [Reading(ids=tuple(x), row=engine.start(), reference=i) for i, x in enumerate((text, poisoned))]
    assert [one.sound for one in read(engine, readings, 16)] == [True, False]
    for at, status in ((99, "ok"), (90, "failed"), (10, "failed")):  # the last token is only predicted, never fed
        one = ids(100, seed=1)
        one[at] = POISON
        (found,) = windows(engine, [Window(tuple(one), 99)], [Stack()])
        assert found.status == status, at
    assert found.error is not None and UNSOUND in found.error


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model whose keys are beyond what an fp16 cache holds."""
    settings = LlamaConfig(**(SHAPE | {"vocab_size": VOCABULARY, "num_key_value_heads": 2}))
    model = copy.deepcopy(build(settings, "sdpa"))
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 1e6
    return *on_disk(tmp_path_factory.mktemp("overflowing") / "model", settings, model), "model.kv_dtype=float16"


@pytest.mark.parametrize("task", ["needle", "stream", *(f"lm_eval {name}" for name in ("choice", "cloze", "text", "answer"))])
def test_an_fp16_cache_that_overflows_fails_on_every_path(overflowing: tuple[str, ...], task: str, tmp_path: Path) -> None:
    """Found by: token 0 twelve times with score 0 and status ok; KL 0 and agreement 1 in a stream."""
    kind, _, name = task.partition(" ")
    how = {"needle": ["task.lengths=[300]"], "stream": ["task.tokens=128", "task.documents=1"]}.get(kind, [])
    if name:
        folder = lm_eval_tasks.write(tmp_path / "tasks", 2)
        how = [f"task.name=local_{name}", f"task.include_path={folder}", "task.truncate=left"]
    found = run(tmp_path / "out", *overflowing, f"task={kind}", *how, STACKS, "limit=1")
    assert len(found) == 3
    assert {record["status"] for record in found} == {"failed"}
    assert {record["score"] for record in found} == {None}
    full = next(record for record in found if record["stack"] == "full")
    assert "no distribution" in full["error"]


def test_tokens_a_model_never_gives_leave_no_measure_out(tmp_path: Path) -> None:
    """Found by: 20 vocabulary entries at minus infinity, KL null for every stack and no reason."""
    settings = PhiConfig(**(SHAPE | {"vocab_size": VOCABULARY + 20}), partial_rotary_factor=0.5)
    model = copy.deepcopy(build(settings, "sdpa"))
    model.lm_head.bias.data[-20:] = -INF
    here = on_disk(tmp_path / "model", settings, model)
    found = run(tmp_path / "out", *here, "task=stream", "task.tokens=128", "task.documents=1", "compress=int4")
    full, lossy = sorted(found, key=lambda record: record["stack"])
    assert full["status"] == lossy["status"] == "ok" and full["missing"] == lossy["missing"] == {}
    assert full["metrics"]["kl_to_full"] == 0.0 < lossy["metrics"]["kl_to_full"] < 1.0
