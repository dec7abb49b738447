"""Kept sets of every scorer equal the slow oracle on random tensors: shapes, budgets, ties, protected tokens, ragged splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Scorer
from harness.stages.score.h2o import H2O
from harness.stages.score.knorm import KeyNorm
from harness.stages.score.random import Random
from harness.stages.score.recency import Recency
from harness.stages.score.snapkv import SnapKV
from harness.stages.score.tova import Tova
from tests.support import conf_tree
from tests.support.kept import kept_tokens, same_tokens
from tests.support.oracles import hand
from tests.support.oracles import keep as oracle
from tests.support.views import view

HEADS = [(4, 4), (4, 2), (4, 1), (9, 3)]
D = 16


def tensors(q_heads: int, kv_heads: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(q_heads, tokens, D, generator=g), torch.randn(kv_heads, tokens, D, generator=g)


def select(keep: Keep, found: LayerView, tokens: int) -> list[list[int]]:
    """Kept tokens per KV head."""
    (index,) = kept_tokens(keep, [found], tokens)
    if index is None:
        return [list(range(found.n)) for _ in range(found.pos_HN.shape[0])]
    return [row.tolist() for part in index for row in part]


def rule(scorer: Scorer, **fields: Any) -> Keep:
    return Keep(scorer=scorer, budget=Amount(unit="fraction", value=1.0), **fields)


SHAPES = [(h, n, b) for h in HEADS for n, b in ((40, 12), (40, 39), (40, 40), (40, 41), (7, 8), (90, 50))]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("sinks", "recent"), [(0, None), (4, None), (1, 5), (0, 0), (4, 0), (0, 8), (3, 9)])
def test_h2o(heads: tuple[int, int], sinks: int, recent: int | None) -> None:
    for n, budget in ((40, 12), (40, 39), (40, 40), (7, 12), (90, 33)):
        q, k = tensors(*heads, n)
        found = select(rule(H2O(), sinks=sinks, recent=recent), view(q, k), budget)
        wanted = oracle.keep_h2o(q, k, budget, sinks, recent)
        for a, b, scores in zip(found, wanted, oracle.h2o_scores(q, k), strict=True):
            same_tokens(a, b, scores)


@pytest.mark.parametrize(("heads", "n", "budget"), SHAPES)
def test_knorm(heads: tuple[int, int], n: int, budget: int) -> None:
    q, k = tensors(*heads, n)
    for sinks, recent in ((0, 0), (4, 2), (0, None)):
        found = select(rule(KeyNorm(), sinks=sinks, recent=recent), view(q, k), budget)
        wanted = oracle.keep_knorm(k, budget, sinks, 0 if recent is None else recent)
        for a, b, scores in zip(found, wanted, oracle.knorm_scores(k), strict=True):
            same_tokens(a, b, scores)


@pytest.mark.parametrize(("heads", "n", "budget"), SHAPES)
def test_tova_keeps_one_set_for_all_heads(heads: tuple[int, int], n: int, budget: int) -> None:
    q, k = tensors(*heads, n)
    found = select(rule(Tova()), view(q, k), budget)
    assert all(row == found[0] for row in found)
    for a, b in zip(found, oracle.keep_tova(q, k, budget), strict=True):
        same_tokens(a, b, oracle.tova_scores(q, k))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("window", "kernel"), [(8, 7), (8, 1), (1, 5), (32, 7), (16, 3)])
def test_snapkv(heads: tuple[int, int], window: int, kernel: int) -> None:
    for n, budget in ((90, 50), (90, window), (40, 39), (40, 40), (33, 33)):
        if budget < window:
            continue
        q, k = tensors(*heads, n, seed=n)
        found = select(rule(SnapKV(window=window, kernel=kernel)), view(q, k), budget)
        wanted = oracle.keep_snapkv(q, k, budget, window, kernel)
        scores = oracle.snapkv_scores(q, k, window, kernel)
        for a, b, row in zip(found, wanted, scores, strict=True):
            same_tokens(a, b, [*row, *[0.0] * window])


def test_case_22_a_prompt_shorter_than_the_observation_window_is_kept_whole() -> None:
    q, k = tensors(4, 2, 10)
    keep = rule(SnapKV(window=64), recent=None)
    assert select(keep, view(q, k), 64) == [list(range(10))] * 2
    scores = SnapKV(window=64).score(view(q, k))
    assert scores.shape == (2, 10)
    assert bool(torch.isfinite(scores).all())


@pytest.mark.parametrize(("n", "budget", "sinks"), [(40, 12, 4), (40, 12, 0), (40, 4, 4), (40, 40, 4), (5, 9, 4), (100, 1, 0)])
def test_streaming_and_window(n: int, budget: int, sinks: int) -> None:
    q, k = tensors(4, 2, n)
    assert select(rule(Recency(), sinks=sinks), view(q, k), budget) == oracle.keep_streaming(n, budget, sinks, heads=2)


@pytest.mark.parametrize(("n", "budget", "sinks", "recent"), [(40, 12, 4, None), (40, 12, 0, 0), (40, 39, 4, 4), (9, 12, 4, 4)])
def test_random_keeps_the_protected_rows_and_follows_its_seed(n: int, budget: int, sinks: int, recent: int | None) -> None:
    q, k = tensors(4, 2, n)
    keep = rule(Random(seed=1), sinks=sinks, recent=recent)
    found = select(keep, view(q, k, seed=5), budget)
    oracle.check_protected(found, n, budget, sinks, oracle.default_recent(budget, sinks) if recent is None else recent)
    assert select(keep, view(q, k, seed=5), budget) == found
    others = [select(rule(Random(seed=s), sinks=sinks, recent=recent), view(q, k, seed=e), budget) for s, e in ((2, 5), (1, 6))]
    middle = budget - sinks - (oracle.default_recent(budget, sinks) if recent is None else recent)
    if n > budget and middle > 3 and n - budget > 3:
        assert all(other != found for other in others)
        assert found[0] != found[1]


def test_random_lots_stay_with_their_row() -> None:
    """A token's random score depends on layer, head and position only: not on how many tokens came after."""
    q, k = tensors(4, 2, 60)
    short, whole = view(q[:, :40], k[:, :40]), view(q, k)
    assert torch.equal(Random().score(short), Random().score(whole)[:, :40])


@pytest.mark.parametrize("scorer", [H2O(), KeyNorm(), Tova(), SnapKV(window=4, kernel=3)], ids=lambda s: type(s).__name__)
def test_of_equal_scores_the_earlier_row_stays(scorer: Scorer) -> None:
    """Equal keys: every score ties but H2O's, which falls with the position anyway."""
    q = torch.ones(4, 20, D)
    k = torch.ones(2, 20, D)
    found = select(rule(scorer, sinks=0, recent=4), view(q, k), 10)
    assert found == [[*range(6), *range(16, 20)]] * 2


def test_hand_worked_sets() -> None:
    q, k = hand.queries(1), hand.keys(hand.C)
    assert select(rule(H2O(), sinks=1, recent=1), view(q, k), 4) == [[0, 2, 4, 5]]
    assert select(rule(H2O(), sinks=1), view(q, k), 4) == [[0, 2, 4, 5]]
    assert select(rule(H2O()), view(q, k), 3) == [[0, 2, 5]]
    grouped = select(rule(H2O(), sinks=1, recent=1), view(hand.queries(1, 0), hand.keys(hand.C, hand.C)), 3)
    assert grouped == [[0, 2, 5], [0, 1, 5]]


def test_scores_are_protected_by_place_not_by_a_sentinel() -> None:
    """Tokens outside sinks and recent compete by score even when it is hugely negative; protected ones never do."""

    class Steep(Scorer):
        def score(self, view: LayerView) -> Tensor:
            return -1e30 * view.pos_HN.float()

    q, k = tensors(4, 2, 12)
    assert select(rule(Steep(), sinks=1, recent=2), view(q, k), 5) == [[0, 1, 2, 10, 11]] * 2


def test_a_score_that_is_not_finite_is_refused() -> None:
    class Broken(Scorer):
        def score(self, view: LayerView) -> Tensor:
            return torch.full(view.pos_HN.shape, float("nan"))

    q, k = tensors(4, 2, 12)
    with pytest.raises(ValueError, match=r"keep\.scorer=Broken returned a score that is not finite in layer 0"):
        select(rule(Broken(), sinks=1, recent=2), view(q, k), 5)


# --- budgets of layers and heads ---------------------------------------------------------------------------------


def test_layers_and_heads_get_their_own_numbers() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Falling:
        def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
            return [tokens + 4, tokens, tokens - 4]

    @dataclass(frozen=True, kw_only=True)
    class First:
        def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
            return [tokens + 2, tokens - 2]

    q, k = tensors(4, 2, 40)
    keep = rule(KeyNorm(), sinks=2, recent=3, layers=Falling(), heads=First())
    scores = oracle.knorm_scores(k)
    for index, budget in zip(kept_tokens(keep, [view(q, k)] * 3, 16), (20, 16, 12), strict=True):
        assert index is not None
        for row, score, extra in zip(index, scores, (2, -2), strict=True):
            assert row.shape == (1, budget + extra)
            same_tokens(row[0].tolist(), oracle.keep_rows(score, 40, budget + extra, 2, 3), score)


# --- cases 20 and 21 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_case_20_short_prompts_never_lose_everything(name: str) -> None:
    """Prompts of 1, 2 and 3 tokens, 60% and 99% removed: at least one token stays, or the request is refused in one line."""
    for n, fraction in product((1, 2, 3), (0.4, 0.01)):
        q, k = tensors(4, 2, n)
        keep = conf_tree.member("keep", name, f"budget.value={fraction}")
        tokens = keep.budget.tokens(n, lambda rows: rows)
        assert 1 <= tokens <= n
        try:
            keep.protected(tokens)
        except UserError as error:
            assert "is too small: sinks" in str(error)
            continue
        found = select(keep, view(q, k), tokens)
        assert sum(map(len, found)) == 2 * tokens


def test_case_21_budget_against_sinks_and_recent() -> None:
    def keep(value: int, **fields: Any) -> Keep:
        return Keep(scorer=H2O(), budget=Amount(unit="tokens", value=value), **fields)

    with pytest.raises(UserError, match=r"keep\.budget\.value=16 tokens is too small: sinks 4 \+ recent 32 need at least 36"):
        keep(16, sinks=4, recent=32)
    q, k = tensors(4, 2, 60)
    assert select(keep(36, sinks=4, recent=32), view(q, k), 36) == [[*range(4), *range(28, 60)]] * 2
    for sinks, recent in ((0, 8), (4, 0), (0, 0)):
        found = select(keep(16, sinks=sinks, recent=recent), view(q, k), 16)
        oracle.check_protected(found, 60, 16, sinks, recent)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sinks": -1}, r"keep\.sinks=-1"),
        ({"sinks": "4"}, r"keep\.sinks='4'"),
        ({"recent": -3}, r"keep\.recent=-3"),
        ({"recent": 0.5}, r"keep\.recent=0\.5"),
    ],
)
def test_settings_are_refused_in_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        rule(H2O(), **fields)


# --- every member of conf/keep -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_every_member_keeps_its_budget_in_order_and_is_deterministic(name: str) -> None:
    for (n_q, n_kv), (n, budget) in product(HEADS, ((90, 40), (90, 89), (90, 90), (90, 200))):
        q, k = tensors(n_q, n_kv, n)
        keep = conf_tree.keep(name, budget)
        found = select(keep, view(q, k), budget)
        sinks, recent = keep.protected(budget)
        assert sum(map(len, found)) <= n_kv * min(n, budget)
        if name != "duo":  # once a retrieval head keeps everything the rest is not spent
            assert sum(map(len, found)) == n_kv * min(n, budget)
        for row in found:  # heads may hold different numbers of tokens
            oracle.check_protected([row], n, len(row), sinks, min(recent, n))
        assert select(keep, view(q.clone(), k.clone()), budget) == found
