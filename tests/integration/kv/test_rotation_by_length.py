"""Models whose rotation depends on the length of the text: one length a request, whatever shares its batch or its chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Phi3Config, PretrainedConfig

from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.engine.streams import Reading, read
from harness.kv.attention import NAME
from harness.kv.compat import forward
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.asking import owned
from tests.support.running import VOCABULARY, on_disk, run
from tests.support.tiny_models import SHAPE, build, ids

ORIGINAL = 64


def settings(kind: str, **more: Any) -> PretrainedConfig:
    """128 positions, half of them with other angles than the rest would have."""
    shape = SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 512} | more
    if kind == "longrope":
        half = shape["hidden_size"] // shape["num_attention_heads"] // 2
        rope = {"short_factor": [1.0] * half, "long_factor": [1.0 + 0.5 * i for i in range(half)]}
        rope |= {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
        return Phi3Config(**shape, original_max_position_embeddings=ORIGINAL, rope_parameters=rope)
    shape["max_position_embeddings"] = ORIGINAL
    return LlamaConfig(**shape, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})


@pytest.fixture(scope="module", params=["longrope", "dynamic"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(build(settings(request.param), NAME), torch.float32)


def serve(engine: Engine, jobs: list[Question[Any]]) -> dict[str, Result[Any]]:
    return owned(engine, jobs)


def test_the_full_caches_answers_do_not_depend_on_the_neighbour(engine: Engine) -> None:
    """Found by: a 25- and a 152-token prompt in one file. The kind: one setting of a whole batch where each row has its own."""
    target = tuple(ids(5, seed=3))
    jobs = [
        Question(owner=str(n), prefix=tuple(ids(n, seed=n)), stack=Stack(), held=(5, 6), targets=(target,))
        for n in (25, 152, 60, 300)
    ]
    together = serve(engine, jobs)
    for job in jobs:
        alone = serve(engine, [job])[job.owner]
        assert alone.status == "ok", alone.error
        assert together[job.owner].scored[0].logp == pytest.approx(alone.scored[0].logp, abs=1e-4)
        assert alone.row is not None and alone.row.length == job.length == len(job.prefix) + 2 + 4


def test_one_context_under_two_lengths_is_read_twice(engine: Engine) -> None:
    """A prompt that its answer takes over the switch has one rotation from its first token on."""
    context = tuple(ids(60))
    short, long = (Question(owner=str(n), prefix=context, stack=Stack(), held=(5,), max_new=n) for n in (3, 40))
    found = serve(engine, [short, long])
    assert [found[job.owner].row.length for job in (short, long)] == [63, 100]  # type: ignore[union-attr]
    for job in (short, long):
        (alone,) = serve(engine, [job]).values()
        assert alone.answer is not None and found[job.owner].answer is not None
        assert alone.answer.ids == found[job.owner].answer.ids  # type: ignore[union-attr]


def test_chunks_do_not_change_a_stream_which_is_the_stock_models(engine: Engine) -> None:
    """Found by: perplexity 590, 592 and 606 with chunks of 8, 64 and 200."""
    text = tuple(ids(200))
    found = []
    for chunk in (8, 64, 199):
        (one,) = read(engine, [Reading(ids=text, row=engine.start(length=199), reference=0)], chunk)
        found.append(one.curve("nll"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)
    model = build(engine.model.config, "sdpa")
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        logits = forward(model, torch.tensor([text[:-1]]), torch.arange(199)[None], cache, slice(None))[0]
    stock = -logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found[-1], stock.numpy(), atol=1e-4)


def test_everything_kept_in_chunks_is_the_full_cache(engine: Engine) -> None:
    whole = Stack(keep=conf_tree.keep("streaming", 400), phase="chunked", chunk=32)
    jobs = [
        Question(owner=name, prefix=tuple(ids(150)), stack=stack, held=(5, 6), targets=((7, 8, 9),))
        for name, stack in (("chunked", whole), ("full", Stack()))
    ]
    found = serve(engine, jobs)
    assert found["chunked"].scored[0].logp == pytest.approx(found["full"].scored[0].logp, abs=1e-4)


def test_the_length_is_in_the_record(tmp_path: Path) -> None:
    here = on_disk(tmp_path / "model", settings("longrope", vocab_size=VOCABULARY))
    kept = "[window,'compress.points=[{keep.budget.value: 0.5}]']"
    stream = ("task=stream", "task.tokens=100", "task.documents=1")
    found = run(tmp_path / "out", *here, *stream, f"stacks=[{kept}]")
    assert [(r["status"], r["rope_length"]) for r in found] == [("ok", 99)] * 2
    found = run(
        tmp_path / "out", *here, "task=needle", "task.lengths=[300]", "task.max_new_tokens=8", "limit=1", f"stacks=[{kept}]"
    )
    assert [(r["status"], r["rope_length"]) for r in found] == [("ok", found[0]["n_prompt"] + 7)] * 2
