"""When tokens are evicted: chunked contexts, every n tokens, at every step; each against a stepwise oracle, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.errors import UserError
from harness.kv.sequence_cache import SequenceCache
from harness.stages.codec.int8 import Int8
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import owned
from tests.support.oracles import steps
from tests.support.recording import keys, queries, recording
from tests.support.tiny_models import FAMILIES, ids

CONTEXT, CHUNK, BUDGET = 90, 20, 24


def chunked(name: str, budget: int = BUDGET, **fields: object) -> Stack:
    return Stack(keep=conf_tree.keep(name, budget), phase="chunked", chunk=CHUNK, **fields)  # type: ignore[arg-type]


def read(engine: Engine, stack: Stack, n: int = CONTEXT) -> tuple[SequenceCache, int]:
    (found,) = engine.read_chunked(ids(n), [engine.start(stack, n)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_and_one_shot_agree_when_nothing_is_evicted(family: str) -> None:
    engine = tiny_models.engine(family)
    row, _ = read(engine, chunked("streaming", CONTEXT))
    (_, a), (_, b) = (engine.feed([r], [ids(5, seed=1)]) for r in (row, engine.prefill(ids(CONTEXT)).row))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert row.bytes() == engine.prefill(ids(CONTEXT)).row.bytes()


@pytest.mark.parametrize("sinks", [0, 4])
def test_chunked_streaming_keeps_sinks_and_the_newest(sinks: int) -> None:
    row, _ = read(tiny_models.engine("llama"), chunked("streaming" if sinks else "window"))
    wanted = [*range(sinks), *range(CONTEXT - BUDGET + sinks, CONTEXT)]
    assert [[h.tolist() for h in layer] for layer in row.kept_positions()] == [[wanted] * 2] * 3


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["h2o", "sink_h2o", "tova"])
def test_chunked_kept_sets_equal_the_stepwise_oracle(name: str, kv_heads: int) -> None:
    """The chunks of a context are the oracle's forwards; scores read only what the chunk's queries could see."""
    engine = tiny_models.engine("llama", kv_heads)
    with recording(engine.shape.full_layers) as recorded:
        row, _ = read(engine, chunked(name))
    for layer in engine.shape.full_layers:
        q, k = queries(recorded[layer]), keys(recorded[layer])
        if name == "tova":
            wanted = steps.run_tova_steps(q, k, BUDGET)
        else:
            wanted = steps.run_h2o_steps(q, k, BUDGET, 4 if name == "sink_h2o" else 0)
        assert [h.tolist() for h in row.kept_positions()[layer]] == wanted[-1].kept
    assert all(part.sums_HN is None for part in row.head_groups)  # nothing needs them after the context


def test_chunked_memory_is_bounded_from_the_first_token() -> None:
    """Never more than budget + chunk tokens per layer and head, as the peak says; positions are counted with them."""
    engine = tiny_models.engine("llama")
    layer = engine.shape.layers[0]
    for n in (100, 400):
        row, peak = read(engine, chunked("streaming"), n)
        rows = 3 * layer.heads * (BUDGET + CHUNK)
        assert peak == rows * (2 * layer.d_key * 4 + 4)
        assert {held for one in row.held() for held in one} == {BUDGET}


def test_after_a_chunked_context_the_answer_grows() -> None:
    engine = tiny_models.engine("llama")
    row, _ = read(engine, chunked("h2o"))
    (answer,) = engine.answer([Ask(row=row, held=ids(4), max_new=6)])
    assert {n for layer in answer.row.held() for n in layer} == {BUDGET + 4 + 5}


def test_chunks_of_many_stacks_are_read_together_as_alone() -> None:
    engine = tiny_models.engine("llama")
    stacks = [chunked("h2o"), chunked("tova", keys=Int8(), values=Int8()), replace(chunked("streaming"), chunk=33)]
    jobs = [
        Question(owner=i, prefix=tuple(ids(CONTEXT)), stack=s, held=(3, 4), max_new=5) for i, s in enumerate([*stacks, Stack()])
    ]

    def serve(some: list[Question[Any]]) -> dict[int, Result[Any]]:
        return owned(engine, some)

    together, alone = serve(jobs), {job.owner: serve([job])[job.owner] for job in jobs}
    for tag, one in together.items():
        assert one.status == alone[tag].status == "ok", one.error
        assert one.answer is not None and alone[tag].answer is not None
        assert one.answer.ids == alone[tag].answer.ids
        assert one.peak_prefill == alone[tag].peak_prefill
        for a, b in zip(one.final.kept_positions(), alone[tag].final.kept_positions(), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("every", [1, 4, 7])
def test_every_n_lets_n_tokens_join_and_then_evicts(every: int) -> None:
    engine = tiny_models.engine("llama")
    stack = Stack(keep=conf_tree.keep("streaming", BUDGET), phase="every_n", every=every)
    row = engine.compress(engine.prefill(ids(CONTEXT)), stack)
    seen, joined = CONTEXT, 0
    for n in (1, 1, 1, 2, 1, 5, 1, 1, 1, 1):
        ((row,), _), seen, joined = engine.feed([row], [ids(n)]), seen + n, joined + n
        joined = 0 if joined >= every else joined
        newest = [*range(4), *range(seen - joined - BUDGET + 4, seen)]
        assert [h.tolist() for h in row.kept_positions()[0]] == [newest] * 2


def test_wrong_phases_are_refused_with_what_is_legal() -> None:
    for key, value in (("phase", "sometimes"), ("chunk", 0), ("every", 0), ("positions", "here")):
        with pytest.raises(UserError, match=rf"compress\.{key}"):
            Stack(keep=conf_tree.keep("streaming", 8), **{key: value})
    with pytest.raises(UserError, match=r"compress\.every=4 .*phase=every_n"):
        Stack(keep=conf_tree.keep("streaming", 8), phase="always", every=4)
    with pytest.raises(UserError, match=r"SnapKV runs in prefill, chunked"):
        Stack(keep=conf_tree.keep("snapkv", 64), phase="every_n", every=4)
