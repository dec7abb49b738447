"""Every legal pair of keep and codec runs: tokens are evicted, then stored in few bits, bytes are the prediction, logits finite."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.stages.score.recency import Recency
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids

SEEN, BUDGET = 200, 150
LEGAL = ("legal are phase=prefill", "legal are keep.recent >= ", "runs in prefill", "legal are a keep by position")


@lru_cache
def engine() -> Engine:
    return tiny_models.engine("llama")


@lru_cache
def prefix() -> Prefix:
    return engine().prefill(ids(SEEN), conf_tree.everything())


def pairs(codec: str) -> list[tuple[str, Stack]]:
    """(name, stack) of every keep and phase with this codec; pairs that are refused say what is legal instead."""
    found = []
    for name in conf_tree.members("keep"):
        keep = conf_tree.keep(name, BUDGET)
        for phase in ("prefill", "chunked", "always"):
            if phase not in keep.scorer.phases:
                continue
            stored = conf_tree.member("codec", codec)
            try:
                stack = Stack(keep=keep, phase=phase, keys=stored, values=stored)
                stack.budget(SEEN, lambda n: n)
            except UserError as error:
                assert phase != "prefill" or stored.aligned
                assert any(words in str(error) for words in LEGAL), error
                continue
            found.append((f"{name} {phase}", stack))
    return found


def uniform(stack: Stack) -> bool:
    return stack.keep is not None and {type(stack.keep.layers).__name__, type(stack.keep.heads).__name__} == {"Uniform"}


def row_of(run: Engine, whole: Prefix, stack: Stack) -> SequenceCache:
    return run.read_chunked(ids(SEEN), [run.start(stack, SEEN)])[0][0] if stack.chunked else run.compress(whole, stack)


@pytest.mark.parametrize("codec", conf_tree.members("codec"))
def test_every_legal_pair_runs_and_its_bytes_are_the_formula(codec: str) -> None:
    run, whole = engine(), prefix()
    runs = pairs(codec)
    keeps = {name: conf_tree.keep(name, BUDGET) for name in conf_tree.members("keep")}
    apart = {name for name, keep in keeps.items() if not (isinstance(keep.scorer, Recency) and uniform(Stack(keep=keep)))}
    together = conf_tree.member("codec", codec).aligned  # heads that share coefficients hold the same tokens
    assert {keep.split()[0] for keep, _ in runs} == set(keeps) - (apart if together else set()), (
        "every keep is legal in some phase"
    )
    rows = [row_of(run, whole, stack) for _, stack in runs]
    for (name, stack), row in zip(runs, rows, strict=True):
        assert not uniform(stack) or row.bytes().total == predict(stack, run.shape, BUDGET, 4, SEEN), name
        assert row.touched() > 0
        assert row.size <= BUDGET * len(run.shape.layers) * run.shape.layers[0].heads
    for step in (40, 1):
        rows, logits = run.feed(rows, [ids(step, seed=step)] * len(rows))
        assert bool(torch.isfinite(logits).all())
    for (name, stack), row in zip(runs, rows, strict=True):
        if not uniform(stack):
            continue
        (n,) = {n for layer in row.held() for n in layer}
        assert n == (BUDGET if stack.evicts_steps else BUDGET + 41), name
        assert row.bytes().total == predict(stack, run.shape, n, 4, row.seen, row.seen - SEEN), name
