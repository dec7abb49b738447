"""Budgets of layers and KV heads equal their oracles, to the token: pyramid, entropy, Ada-KV, retrieval heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from harness.errors import UserError
from harness.records.keys import code_hash
from harness.stages.apportion import apportion
from harness.stages.heads.adakv import AdaKV
from harness.stages.heads.retrieval_split import RetrievalHeads
from harness.stages.layers.entropy import Entropy
from harness.stages.layers.pyramid import Pyramid
from harness.stages.layers.retrieval_layers import RetrievalLayers
from harness.stages.protocols import LayerView
from harness.stages.score.h2o import H2O
from harness.stages.score.recency import Recency
from harness.stages.score.snapkv import SnapKV
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.kept import same_tokens
from tests.support.oracles import keep as oracle
from tests.support.oracles import policies
from tests.support.views import HEADS, chosen, rule, tensors, view


def layers(n: int, tokens: int, heads: tuple[int, int] = (4, 2)) -> list[LayerView]:
    """Views of n layers, each with its own tensors; the later a layer, the sharper its attention."""
    found = []
    for i in range(n):
        q, k, v = tensors(*heads, tokens, seed=i)
        found.append(view((1 + i) * q, k, v, layer=i))
    return found


# --- whole numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "total", "wanted"),
    [
        (["1/2", "1/2"], 1, [1, 0]),
        (["1/3", "2/3", "1"], 2, [0, 1, 1]),
        (["5/2", "5/2", "1"], 6, [3, 2, 1]),
        (["4", "0"], 4, [4, 0]),
        ([], 0, []),
    ],
)
def test_largest_remainders_are_rounded_up(shares: list[str], total: int, wanted: list[int]) -> None:
    assert apportion([Fraction(s) for s in shares], total) == wanted
    assert policies.whole([Fraction(s) for s in shares], total) == wanted


# --- pyramid -----------------------------------------------------------------------------------------------------


def split(budget: Pyramid, tokens: int, n: int, context: int) -> list[int]:
    return budget.split(tokens, layers(1, context) * n)


@pytest.mark.parametrize("beta", [2, 14, 20])
@pytest.mark.parametrize("window", [0, 8, 32])
def test_pyramid_in_whole_steps_is_the_authors_formula(beta: int, window: int) -> None:
    for n in (2, 3, 30):
        for context in (40, 100, 300):
            for tokens in range(window + 1, context, 7):
                pyramid = Pyramid(beta=beta, protected=window, rounding="floor")
                wanted = policies.pyramid_floor(tokens, window, context, n, beta)
                assert split(pyramid, tokens, n, context) == wanted, (n, context, tokens)


@pytest.mark.parametrize("window", [0, 32])
def test_pyramid_spends_its_budget_exactly_along_the_line(window: int) -> None:
    for n in (2, 3, 4, 30):
        for context in (100, 300):
            for tokens in range(window + 1, context, 5):
                found = split(Pyramid(protected=window), tokens, n, context)
                assert sum(found) == n * tokens
                assert all(a >= b for a, b in pairwise(found)), "never more rows in a higher layer"
                assert window <= found[-1] and found[0] <= context
                line = policies.pyramid_floor(tokens, window, context, n)
                assert found[0] == line[0], "both begin with the same layer"
                step = Fraction(found[0] - 2 * tokens + found[0], n - 1)
                assert all(abs(rows - (found[0] - i * step)) < 1 for i, rows in enumerate(found))


def test_pyramid_by_hand() -> None:
    # C = 72, W = 32: B = 40, the last layer gets 40 // 20 = 2, the first 78; three layers: 78, 40, 2, and the window each
    assert split(Pyramid(protected=32), 72, 3, 400) == [110, 72, 34]
    # context 100: at most 68 beyond the window, so the last gets 80 - 68 = 12
    assert split(Pyramid(protected=32), 72, 3, 100) == [100, 72, 44]
    # two 40s do not fit in 79 tokens: every layer gets as much
    assert split(Pyramid(protected=32), 72, 3, 79) == [72, 72, 72]
    # B = 21, four layers: from 41 to 1 in steps of 13 1/3; whole steps of 13 end at 2, one token too many
    assert split(Pyramid(), 21, 4, 400) == [41, 28, 14, 1]
    assert split(Pyramid(rounding="floor"), 21, 4, 400) == [41, 28, 15, 2]


def test_pyramid_takes_what_the_keep_protects() -> None:
    views = layers(3, 200)
    for sinks, recent in ((0, None), (4, 10)):
        kept = chosen(rule(SnapKV(window=16), sinks=sinks, recent=recent, layers=Pyramid()), views, 60)
        protected = sinks + (16 if recent is None else recent)
        assert [len(layer[0]) for layer in kept] == split(Pyramid(protected=protected), 60, 3, 200)


def test_pyramidkv_rows_are_snapkvs_under_each_layers_own_budget() -> None:
    """Case 16 for a whole policy: layers hold different numbers of tokens, each the best by its own scores."""
    keep = conf_tree.keep("pyramidkv", 60)
    views = layers(4, 150)
    kept = chosen(keep, views, 60)
    budgets = split(Pyramid(protected=32), 60, 4, 150)
    assert len(set(budgets)) == 4
    for i, (rows, budget) in enumerate(zip(kept, budgets, strict=True)):
        q, k, _ = tensors(4, 2, 150, seed=i)
        scores = oracle.snapkv_scores((1 + i) * q, k)
        for found, wanted, score in zip(rows, oracle.keep_snapkv((1 + i) * q, k, budget), scores, strict=True):
            same_tokens(found, wanted, [*score, *[0.0] * 32])


def test_a_layer_too_small_for_its_sinks_and_recent_rows_is_refused_by_name() -> None:
    keep = rule(H2O(), sinks=4, recent=2, layers=Pyramid(protected=0))
    with pytest.raises(
        UserError, match=r"keep\.layers=Pyramid sets 1 tokens a head in layer 2 \(mean 20\): .* need at least 6"
    ):
        keep.choose(layers(3, 100), 20)


# --- entropy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_entropy_shares_are_the_oracles(heads: tuple[int, int]) -> None:
    views = layers(3, 40, heads)
    for window, floor, protected, tokens in ((8, "0.2", 4, 16), (3, "0.0", 0, 9), (40, "1.0", 2, 11), (8, "0.5", 0, 20)):
        found = Entropy(window=window, floor=float(floor), protected=protected).split(tokens, views)
        entropies = []
        for i in range(3):
            q, k, _ = tensors(*heads, 40, seed=i)
            entropies.append(Fraction(policies.mean_entropy((1 + i) * q, k, window)))
        assert entropies[0] > entropies[1] > entropies[2], "sharper layers look at less"
        each, own = tokens - protected, Fraction(floor) * (tokens - protected)
        shares = [own + 3 * (each - own) * e / sum(entropies) for e in entropies]
        assert found == [n + protected for n in policies.whole(shares, 3 * each)]
        assert sum(found) == 3 * tokens


def test_what_a_layer_cannot_use_goes_to_the_others() -> None:
    """One layer looks at nothing but its own token: the others share what there is, at most all tokens each."""
    _, k, v = tensors(2, 2, 40)
    sharp = view(200 * k, k, v)  # every query finds its own key
    assert Entropy(floor=0.0).split(30, [*layers(2, 40), sharp])[:2] == [40, 40]
    assert sum(Entropy(floor=0.0).split(30, [*layers(2, 40), sharp])) == 90
    assert Entropy(floor=0.5).split(10, [sharp, sharp]) == [10, 10]


def test_entropy_asks_for_the_queries_it_reads_and_runs_once() -> None:
    stack = Stack(keep=rule(Recency(), recent=0, layers=Entropy(window=7)))
    assert stack.needs.queries == 7
    with pytest.raises(UserError, match=r"phase='always' is not possible: keep\.layers=Entropy runs in prefill"):
        Stack(keep=rule(Recency(), recent=0, layers=Entropy(window=7)), phase="always")


# --- Ada-KV ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("alpha", ["0.0", "0.2", "0.5", "1.0"])
def test_adakv_counts_are_the_oracles(heads: tuple[int, int], alpha: str) -> None:
    for m, each in ((30, 7), (30, 29), (30, 30), (5, 1), (8, 0)):
        g = torch.Generator().manual_seed(m)
        scores = torch.rand(heads[1], m, generator=g) * torch.arange(1, heads[1] + 1)[:, None]
        found = AdaKV(alpha=float(alpha)).split(each, scores, 0)
        assert found == policies.adakv_counts(scores.tolist(), each, alpha)
        assert sum(found) == heads[1] * each
        assert all(0 <= n <= m for n in found)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_adakv_keeps_each_heads_best_rows_and_the_layers_total(heads: tuple[int, int]) -> None:
    for tokens, budget in ((90, 50), (90, 89), (60, 33)):
        q, k, v = tensors(*heads, tokens, seed=1)
        q = q * torch.arange(1, heads[0] + 1)[:, None, None]  # the later a head, the sharper
        kept = chosen(conf_tree.keep("adakv", budget), [view(q, k, v)], budget)[0]
        scores = oracle.snapkv_scores(q, k)
        counts = policies.adakv_counts(scores, budget - 32, "0.2")
        for rows, score, count in zip(kept, scores, counts, strict=True):
            padded = [*score, *[0.0] * 32]
            same_tokens(rows, oracle.keep_rows(padded, tokens, count + 32, 0, 32), padded)
        assert sum(map(len, kept)) == heads[1] * budget
        assert heads[1] == 1 or len({len(rows) for rows in kept}) > 1 or budget == 89


def test_adakv_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]])
    assert AdaKV(alpha=0.0).split(2, scores, 0) == [4, 0]
    assert AdaKV(alpha=0.5).split(2, scores, 0) == [3, 1]
    assert AdaKV(alpha=1.0).split(2, scores, 0) == [2, 2]
    assert AdaKV(alpha=0.2).split(2, scores, 0) == [4, 0]  # 3.6 and 0.4
    assert AdaKV(alpha=0.0).split(1, torch.ones(2, 4), 0) == [2, 0]  # ties: the earlier head


# --- retrieval heads ---------------------------------------------------------------------------------------------


def test_retrieval_heads_share_what_streaming_heads_leave() -> None:
    scores = torch.zeros(3, 50)
    assert RetrievalHeads(heads=[[0, 1]]).split(10, scores, 0) == [0, 30, 0]
    assert RetrievalHeads(heads=[[0, 1], [0, 2], [4, 0]]).split(5, scores, 0) == [0, 8, 7]
    assert RetrievalHeads(heads=[[0, 1]]).split(20, scores, 0) == [0, 50, 0], "no more than there are"
    assert RetrievalHeads(heads=[[4, 0]]).split(10, scores, 0) == [0, 0, 0], "a layer without any only streams"
    assert RetrievalHeads().split(10, scores, 0) == [15, 15, 0], "the placebo: the first half of the heads"


def test_layers_get_what_their_retrieval_heads_need() -> None:
    pairs = [[0, 0], [2, 0], [2, 1]]
    views = layers(3, 200)
    keep = rule(Recency(), sinks=4, recent=6, layers=RetrievalLayers(heads=pairs), heads=RetrievalHeads(heads=pairs))
    kept = chosen(keep, views, 40)
    # 30 tokens beyond the protected 10, 6 heads: 180 tokens over 3 retrieval heads
    assert [[len(rows) for rows in layer] for layer in kept] == [[70, 10], [10, 10], [70, 70]]
    assert sum(len(rows) for layer in kept for rows in layer) == 40 * 6
    for head in (kept[0][1], *kept[1]):
        assert head == [*range(4), *range(194, 200)]
    assert kept[0][0] == [*range(4), *range(134, 200)]
    # 190 tokens each would be more than all: they keep everything, the rest of the budget is not spent
    assert [[len(r) for r in layer] for layer in chosen(keep, views, 150)] == [[200, 10], [10, 10], [200, 200]]
    assert chosen(keep, views, 200) == [[list(range(200))] * 2] * 3


def test_a_list_comes_from_json_and_its_content_is_part_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"heads": [[0, 1]], "model": "any"}))
    assert RetrievalHeads(file=str(file)).split(3, torch.zeros(2, 9), 0) == [0, 6]
    config = {"keep": {"heads": {"file": str(file)}}}
    assert code_hash(config) != code_hash({"keep": {"heads": {"file": None}}})
    other = tmp_path / "two.json"
    other.write_text(json.dumps({"heads": [[0, 0]]}))
    assert code_hash(config) != code_hash({"keep": {"heads": {"file": str(other)}}})


def out_of_range() -> None:
    RetrievalHeads(heads=[[0, 5]]).split(3, torch.zeros(2, 9), 0)


def unknown_layer() -> None:
    RetrievalLayers(heads=[[7, 0]], protected=0).split(9, layers(2, 20))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: RetrievalHeads(heads=[[0]]),
            r"keep\.heads\.heads=\[\[0\]\] is not possible: a list of \[layer, KV head\] pairs",
        ),
        (lambda: RetrievalHeads(heads=[[0, -1]]), r"keep\.heads\.heads="),
        (lambda: RetrievalHeads(heads=[[0, 1]], file="x"), r"keep\.heads\.file='x' .* give one of the two"),
        (lambda: RetrievalHeads(file="/nonexistent"), r"keep\.heads\.file=/nonexistent is not possible"),
        (out_of_range, r"keep\.heads names KV head 5 of layer 0, which has 2: the list is another model's"),
        (unknown_layer, r"keep\.layers names heads of layer 7, which is not a layer of this model"),
        (lambda: RetrievalLayers(protected=-1), r"keep\.layers\.protected=-1"),
        (lambda: AdaKV(alpha=1.5), r"keep\.heads\.alpha=1\.5 is not possible: a fraction"),
        (lambda: Pyramid(beta=1), r"keep\.layers\.beta=1"),
        (lambda: Pyramid(rounding="up"), r"keep\.layers\.rounding='up' .* exact, floor"),
        (lambda: Pyramid(protected=-1), r"keep\.layers\.protected=-1"),
        (lambda: Entropy(window=0), r"keep\.layers\.window=0"),
        (lambda: Entropy(floor=2), r"keep\.layers\.floor=2"),
    ],
)
def test_settings_are_refused_in_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


# --- every member of the groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["layers", "heads"])
def test_every_member_of_a_group_is_tried_with_every_keep(group: str) -> None:
    """Whatever split is put into whatever keep: never more than the budget, protected tokens there, or one line of refusal."""
    views = layers(3, 130)
    for name in conf_tree.members(group):
        part = conf_tree.split(group, name)
        for keep_name in conf_tree.members("keep"):
            keep = conf_tree.keep(keep_name, 60, **{group: part})
            sinks, _ = keep.protected(60)
            try:
                kept = chosen(keep, views, 60)
            except UserError as error:
                assert "tokens a head in layer" in str(error)
                continue
            assert sum(len(rows) for layer in kept for rows in layer) <= 60 * 6
            for rows in (rows for layer in kept for rows in layer):
                assert rows == sorted(set(rows))
                assert set(range(sinks)) <= set(rows)
