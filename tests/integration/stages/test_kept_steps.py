"""Kept sets under eviction after every step equal the stepwise oracles, on tiny models; teacher-forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.stages.codec.int8 import Int8
from harness.stages.keep import Keep
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.kept import same_tokens
from tests.support.oracles import keep as oracle
from tests.support.oracles import steps
from tests.support.recording import Recorded, keys, queries, recording
from tests.support.tiny_models import ids

CALLS = (70, 9, 1, 1, 3, 1, 1, 1)
EVERYTHING = Needs(column_sums=True, queries=32)


def stepped(engine: Engine, stack: Stack, calls: Sequence[Sequence[int]]) -> list[SequenceCache]:
    """The row after every call."""
    rows = [engine.compress(engine.prefill(calls[0], EVERYTHING), stack)]
    for tokens in calls[1:]:
        rows.append(engine.feed([rows[-1]], [tokens])[0][0])
    return rows


def check(rows: Sequence[SequenceCache], layer: int, wanted: Sequence[oracle.Step]) -> None:
    """Kept positions after every call are those of the oracle."""
    for at, (row, step) in enumerate(zip(rows, wanted, strict=True)):
        for h, head in enumerate(row.kept_positions()[layer]):
            assert head.tolist() == step.kept[h], (at, layer, h)


def tokens_of(calls: Sequence[int]) -> list[list[int]]:
    stream = iter(ids(sum(calls), seed=4))
    return [[next(stream) for _ in range(n)] for n in calls]


def run(family: str, kv_heads: int, stack: Stack) -> tuple[Engine, list[SequenceCache], Recorded]:
    engine = tiny_models.engine(family, kv_heads)
    with recording(engine.shape.full_layers) as recorded:
        rows = stepped(engine, stack, tokens_of(CALLS))
    return engine, rows, recorded


def always(name: str, budget: int, **fields: object) -> Stack:
    keep = conf_tree.keep(name, budget, **fields)
    assert isinstance(keep, Keep)
    return Stack(keep=keep, phase="always")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("budget", [24, 75, 200])
@pytest.mark.parametrize("sinks", [0, 4])
def test_h2o(kv_heads: int, budget: int, sinks: int) -> None:
    engine, rows, recorded = run("llama", kv_heads, always("h2o", budget, sinks=sinks))
    for layer in engine.shape.full_layers:
        wanted = steps.run_h2o_steps(queries(recorded[layer]), keys(recorded[layer]), budget, sinks)
        check(rows, layer, wanted)
        part, at = rows[-1].slots[layer][0]
        sums = None if part.sums_HN is None else part.sums_HN[at]
        assert sums is not None
        torch.testing.assert_close(sums, torch.tensor(wanted[-1].scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_h2o_in_other_families(family: str) -> None:
    engine, rows, recorded = run(family, 2, always("sink_h2o", 30))
    if family == "gemma3":
        assert engine.model.config.query_pre_attn_scalar == 32  # the oracle divides by the root of the width
    for layer in engine.shape.full_layers:
        check(rows, layer, steps.run_h2o_steps(queries(recorded[layer]), keys(recorded[layer]), 30, 4))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("budget", [24, 75])
def test_tova(kv_heads: int, budget: int) -> None:
    engine, rows, recorded = run("llama", kv_heads, always("tova", budget))
    for layer in engine.shape.full_layers:
        check(rows, layer, steps.run_tova_steps(queries(recorded[layer]), keys(recorded[layer]), budget))


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("budget", [24, 75])
def test_knorm(budget: int, sinks: int) -> None:
    engine, rows, recorded = run("llama", 2, always("knorm", budget, sinks=sinks, recent=6))
    for layer in engine.shape.full_layers:
        k = keys(recorded[layer])
        norms = oracle.knorm_scores(k)  # a token that comes twice has the same key up to rotation: its norms tie
        for row, step in zip(rows, steps.run_knorm_steps(CALLS, k, budget, sinks, 6), strict=True):
            for head, want, scores in zip(row.kept_positions()[layer], step.kept, norms, strict=True):
                same_tokens(head.tolist(), want, scores)


@pytest.mark.parametrize(("name", "sinks"), [("streaming", 4), ("window", 0)])
def test_streaming(name: str, sinks: int) -> None:
    engine, rows, _ = run("llama", 2, always(name, 24))
    for layer in engine.shape.full_layers:
        check(rows, layer, steps.run_streaming_steps(CALLS, 24, sinks, heads=2))


def test_random_rows_keep_their_lots() -> None:
    _, rows, _ = run("llama", 2, always("random", 24))
    for before, after in pairwise(rows):
        for old, new in zip(before.kept_positions(), after.kept_positions(), strict=True):
            for a, b in zip(old, new, strict=True):
                assert set(b.tolist()) <= set(a.tolist()) | set(range(before.seen, after.seen))
        oracle.check_protected([h.tolist() for h in after.kept_positions()[0]], after.seen, 24, 4, 10)


def stored(x_HTD: Tensor) -> Tensor:
    """Keys as an int8 store gives them back."""
    codec, out = Int8(), torch.empty_like(x_HTD)
    codec.decode(codec.encode(x_HTD), out)
    return out


def test_h2o_scores_of_later_steps_read_the_decoded_keys() -> None:
    keep = conf_tree.keep("sink_h2o", 24)
    engine, rows, recorded = run("llama", 2, Stack(keep=keep, phase="always", keys=Int8(), values=Int8()))
    for layer in engine.shape.full_layers:
        k = keys(recorded[layer])
        check(rows, layer, steps.run_h2o_steps(queries(recorded[layer]), k, 24, 4, k_stored_HTD=stored(k)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_prefill_sets_of_whole_models(family: str) -> None:
    """After the context: every scorer against its oracle on the model's own queries and keys."""
    engine = tiny_models.engine(family)
    with recording(engine.shape.full_layers) as recorded:
        prefix = engine.prefill(ids(90), EVERYTHING)
    for layer in engine.shape.full_layers:
        ((q, k),) = recorded[layer]
        wanted = {
            "h2o": (oracle.keep_h2o(q, k, 40), oracle.h2o_scores(q, k)),
            "sink_h2o": (oracle.keep_h2o(q, k, 40, 4), oracle.h2o_scores(q, k)),
            "snapkv": (oracle.keep_snapkv(q, k, 40), [[*r, *[0.0] * 32] for r in oracle.snapkv_scores(q, k)]),
            "tova": (oracle.keep_tova(q, k, 40), [oracle.tova_scores(q, k)] * len(k)),
            "knorm": (oracle.keep_knorm(k, 40, 0, 0), oracle.knorm_scores(k)),
            "streaming": (oracle.keep_streaming(90, 40, 4, len(k)), [[0.0] * 90] * len(k)),
        }
        for name, (kept, scores) in wanted.items():
            row = engine.compress(prefix, Stack(keep=conf_tree.keep(name, 40)))
            for found, want, score in zip(row.kept_positions()[layer], kept, scores, strict=True):
                same_tokens(found.tolist(), want, score)
