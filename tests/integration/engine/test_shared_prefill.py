"""A scorer sees exactly what it asked for, as its own copy: neither who shares the prefill nor what others do changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.engine.requests import Question
from harness.lm_eval.encoding import Window
from harness.stages.codec.base import Codec
from harness.stages.encoded import Encoded
from harness.stages.keep import Keep
from harness.stages.layers.entropy import Entropy
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.score.knorm import KeyNorm
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results, windows
from tests.support.tiny_models import ids

EVERYTHING = Needs(column_sums=True, queries=48, query_moments=True)
ASKED = [Needs(), Needs(queries=4), Needs(column_sums=True), Needs(query_moments=True), Needs(queries=1, column_sums=True)]


def amount(tokens: int) -> Any:
    return conf_tree.keep("knorm", tokens).budget


@dataclass(frozen=True)
class AllItSees(Scorer):
    """Scores by every statistic in view, and writes down which there were."""

    asked: Needs
    seen: list[tuple[bool, int, bool]] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.asked

    def score(self, view: LayerView) -> Tensor:
        stats, scores = view.stats, view.pos_HN.float() / 1e6
        n = 0 if stats.queries_QWD is None else stats.queries_QWD.shape[1]
        self.seen.append((stats.column_sums_HN is not None, n, stats.query_mean_QD is not None))
        if stats.column_sums_HN is not None:
            scores = scores + stats.column_sums_HN
        if stats.queries_QWD is not None:
            scores = scores + view.window_attention(stats.queries_QWD.shape[1]).sum(1)
        if stats.query_mean_QD is not None:
            scores = scores + torch.einsum(
                "hgd,hnd->hn", stats.query_mean_QD.unflatten(0, (view.k_HND.shape[0], -1)), view.k_HND
            )
        return scores


@dataclass(frozen=True)
class Vandal(Scorer):
    """Writes into everything that it is shown."""

    def score(self, view: LayerView) -> Tensor:
        for tensor in (*view.stats.tensors(), view.k_HND, view.v_HND, view.pos_HN):
            tensor.fill_(7)
        return torch.arange(view.n).expand_as(view.pos_HN).float()

    @property
    def needs(self) -> Needs:
        return EVERYTHING


@dataclass(frozen=True, kw_only=True)
class VandalCodec(Codec):
    """Scales its input in place, as a hasty codec would."""

    name: str = "vandal"

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"rows": x_HND.mul_(0.5).half()}, {}, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        out_HND.copy_(e.payload["rows"]).mul_(2)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * d * 2, 0


def own(asked: Needs, **fields: Any) -> tuple[Stack, AllItSees]:
    scorer = AllItSees(asked)
    return Stack(keep=Keep(scorer=scorer, budget=amount(20), recent=0, **fields)), scorer


def kept(engine: Engine, needs: Needs, stack: Stack) -> list[list[list[int]]]:
    row = engine.compress(engine.prefill(ids(90), needs), stack)
    return [[head.tolist() for head in layer] for layer in row.kept_positions()]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_others_ask_for_is_not_seen(asked: Needs) -> None:
    engine = tiny_models.engine("llama")
    (stack, alone), (_, shared) = own(asked), own(asked)
    wanted = kept(engine, asked, stack)
    assert kept(engine, asked | EVERYTHING, Stack(keep=Keep(scorer=shared, budget=amount(20), recent=0))) == wanted
    assert set(shared.seen) == set(alone.seen) == {(asked.column_sums, asked.queries, asked.query_moments)}


def test_nor_what_the_budget_of_layers_asks_for() -> None:
    stack, scorer = own(Needs(queries=4), layers=Entropy(window=32))
    engine = tiny_models.engine("llama")
    kept(engine, stack.needs, stack)
    assert set(scorer.seen) == {(False, 4, False)}


@pytest.mark.parametrize("phase", ["prefill", "chunked", "always"])
def test_in_every_phase_and_in_windows(phase: str) -> None:
    """Beside SnapKV's 32 queries a scorer that asked for 4 keeps the rows that it keeps alone, through every service."""
    engine = tiny_models.engine("llama")

    def served(beside: Sequence[Stack]) -> tuple[list[list[Tensor]], list[float]]:
        stack = Stack(keep=own(Needs(queries=4))[0].keep, phase=phase, chunk=32)
        jobs = [Question(owner=s is stack, prefix=tuple(ids(90)), stack=s, held=(3, 4), max_new=3) for s in (*beside, stack)]
        found = results(engine, jobs)
        assert {one.status for one in found} == {"ok"}
        rows = next(one for one in found if one.request.owner).final.kept_positions()
        texts = windows(engine, [Window(tuple(ids(100)), 50)], (*beside, stack))
        return rows, [texts[-1].responses[0][0]]

    snapkv = Stack(keep=conf_tree.keep("snapkv", 40))
    (alone, logp), (shared, other) = served([]), served([snapkv, Stack(keep=conf_tree.keep("h2o", 20))])
    assert all(torch.equal(a, b) for x, y in zip(alone, shared, strict=True) for a, b in zip(x, y, strict=True))
    assert logp == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("stack", [Stack(keep=Keep(scorer=Vandal(), budget=amount(20), recent=0)), Stack(keys=VandalCodec())])
def test_what_a_stage_writes_into_is_its_own(stack: Stack) -> None:
    """Scorers and codecs that write into what they are given change nothing for the stacks after them, nor their own store."""
    engine = tiny_models.engine("llama")
    prefix = engine.prefill(ids(90), EVERYTHING)
    others = [Stack(), Stack(keep=conf_tree.keep("h2o", 20)), Stack(keep=conf_tree.keep("snapkv", 40))]
    before = [engine.feed([engine.compress(prefix, one)], [ids(3)])[1] for one in others]
    row = engine.compress(prefix, stack)
    after = [engine.feed([engine.compress(prefix, one)], [ids(3)])[1] for one in others]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if stack.keep is not None:
        assert [head.tolist() for head in row.kept_positions()[0]] == [list(range(70, 90))] * 2


def test_a_scorer_that_writes_while_answering_keeps_its_own_store_whole() -> None:
    plain = tiny_models.engine("llama")
    engine = Engine(plain.model, plain.kv_dtype, invariant=True)  # else two equal rows of a batch may differ in last bits
    stacks = [Stack(keep=Keep(scorer=s, budget=amount(20), recent=0), phase="always") for s in (Vandal(), Newest())]
    rows = [engine.compress(engine.prefill(ids(90), EVERYTHING), one) for one in stacks]
    for n in (3, 1, 1):
        rows, logits = engine.feed(rows, [ids(n)] * 2)
        assert torch.equal(logits[0], logits[1])


@dataclass(frozen=True)
class Newest(KeyNorm):
    """The rows that the vandal keeps."""

    def score(self, view: LayerView) -> Tensor:
        return torch.arange(view.n).expand_as(view.pos_HN).float()
