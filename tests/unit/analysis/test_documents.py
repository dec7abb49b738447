"""Examples that share documents: intervals, tests and verdicts count documents, whatever the kind of score.

The kind of fault: questions on one document taken for independent ones, so that intervals are far too narrow.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, permutation_test

from harness.analysis.clusters import BOOTSTRAP_LEAST, effective_size, sign_flip_p
from harness.analysis.intervals import TOO_FEW, Sample, difference, estimate, mcnemar_exact, wilson
from harness.analysis.points import points
from tests.support.record_factory import make, perplexity


def sample(scores, documents: int, weights=None, *, shares: bool = True) -> Sample:
    """Scores (examples,), the same number of neighbours in each document."""
    scores = np.asarray(scores, dtype=float).ravel()
    weights = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=float)
    return Sample(scores, weights, np.repeat(np.arange(documents), len(scores) // documents).astype(object), shares)


def covered(draw, truth: float, runs: int) -> float:
    return sum(truth in draw().interval for _ in range(runs)) / runs


def test_eight_wordings_of_one_question_count_once() -> None:
    alike = np.repeat([1, 1, 1, 0, 0], 8)
    found = estimate(sample(alike, 5), "mean")
    assert (found.interval.low, found.interval.high) == pytest.approx((0.2307, 0.8824), abs=1e-4)  # Wilson, 3 of 5
    assert found.documents == 5
    same = difference(sample(alike, 5), sample(alike, 5), "mean")
    assert same.interval.half_width > 0.3
    lost = difference(sample(np.repeat([0, 0, 0, 0, 0], 8), 5), sample(alike, 5), "mean")
    assert lost.p_value == 0.25  # 3 documents of 5, not 24 pairs


def test_the_table_says_so_too() -> None:
    right = np.repeat([1, 1, 1, 0, 0], 8)
    records = [
        make(example_id=f"e{i}", group_id=f"g{i // 8}", stack=stack, score=float(score))
        for stack in ("full", "int8")
        for i, score in enumerate(right)
    ]
    row = points(records).set_index("stack").loc["int8"]
    assert (row["n"], row["n_documents"]) == (40, 5)
    assert (row["score_lo"], row["score_hi"]) == pytest.approx((0.2307, 0.8824), abs=1e-4)
    assert row["vs_full"] == "not resolved"


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_without_any_spread_examples_are_worth_as_much_as_their_documents(score: float) -> None:
    found = estimate(sample([score] * 40, 5), "mean").interval
    alone = wilson(5 * score, 5)
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))


def test_one_example_a_document_is_no_other_than_independent_examples() -> None:
    scores = np.array([1, 0, 1, 1, 0, 1, 1, 1.0])
    assert effective_size(scores, np.arange(8).astype(object)) == 8
    found, plain = estimate(sample(scores, 8), "mean").interval, wilson(6, 8)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high))


def test_documents_that_differ_no_more_than_chance_cost_little_and_large_ones_count_less() -> None:
    rng = np.random.default_rng(0)
    worth = effective_size((rng.random(1200) < 0.6).astype(float), np.repeat(np.arange(100), 12).astype(object))
    assert 900 < worth < 1200
    alike = np.array([1.0] * 90 + [0.0] * 10)
    uneven = np.array(["big"] * 90 + [f"g{i}" for i in range(10)], dtype=object)
    assert effective_size(alike, uneven) == pytest.approx(100**2 / (90**2 + 10))


@pytest.mark.parametrize("net", [[3, -1, 2, 0, 5], [1, 1, -1], [4, 4, 4, 4, 4, 4], [-2, 2], [0, 0]])
def test_the_test_over_documents_is_the_exact_permutation_test(net) -> None:
    net = np.asarray(net, dtype=float)
    exact = permutation_test((net,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    assert sign_flip_p(net) == pytest.approx(float(exact))


def test_the_test_over_documents_of_one_example_is_mcnemars() -> None:
    for lost, won in ((0, 0), (1, 7), (5, 5), (8, 0), (30, 12)):
        assert sign_flip_p(np.array([1.0] * lost + [-1.0] * won)) == pytest.approx(mcnemar_exact(lost, won))


def test_the_test_over_documents_keeps_its_level() -> None:
    rng, rejected = np.random.default_rng(1), 0
    for _ in range(400):
        net = np.repeat(rng.choice([-1.0, 0.0, 1.0], 12), 1) * 12
        rejected += sign_flip_p(net) <= 0.05
    assert rejected / 400 <= 0.06


@pytest.mark.parametrize("p", [0.5, 0.8, 0.9])
def test_independent_questions_keep_their_coverage(p: float) -> None:
    inside = [p in estimate(sample(np.arange(100) < right, 100), "mean").interval for right in range(101)]
    assert 0.93 <= float(np.dot(binom.pmf(np.arange(101), 100, p), inside)) <= 0.97  # exact, nothing is drawn


@pytest.mark.parametrize("p", [0.5, 0.8, 0.9])
@pytest.mark.parametrize(("documents", "each"), [(5, 8), (10, 12), (30, 4)])
@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
def test_shared_documents_keep_the_coverage_of_a_proportion(p: float, documents: int, each: int, alike: float) -> None:
    rng = np.random.default_rng(3)

    def draw():
        share = p if alike == 0 else rng.random(documents) < p
        if 0 < alike < 1:  # the intraclass correlation of a beta-binomial
            share = rng.beta(p * (1 - alike) / alike, (1 - p) * (1 - alike) / alike, documents)
        right = rng.random((documents, each)) < np.broadcast_to(share, documents)[:, None]
        return estimate(sample(right, documents), "mean")

    assert covered(draw, p, 600) >= 0.90  # as independent examples: 0.25 to 0.45 where answers are alike


@pytest.mark.parametrize(("documents", "each"), [(100, 1), (5, 8), (10, 12)])
@pytest.mark.parametrize("alike", [True, False])
def test_shared_documents_keep_the_coverage_of_a_paired_difference(documents: int, each: int, alike: bool) -> None:
    rng, times = np.random.default_rng(4), each if alike else 1

    def draw():
        full = np.repeat(rng.random(documents * each // times) < 0.8, times)
        lucky = np.repeat(rng.random(documents * each // times), times)
        small = np.where(full, lucky >= 0.25, lucky < 0.1)
        return difference(sample(small, documents), sample(full, documents), "mean")

    assert covered(draw, 0.2 * 0.1 - 0.8 * 0.25, 500) >= 0.94


@pytest.mark.parametrize("documents", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("each", [1, 6])
def test_a_few_documents_cover_paired_differences_and_scores_of_any_kind(documents: int, each: int) -> None:
    """Resampled, two, three and four documents cover 0.51, 0.77 and 0.88."""
    rng = np.random.default_rng(5)

    def paired():
        own = rng.normal(0.1, 0.2, documents).repeat(each)
        full = rng.normal(3, 1, documents).repeat(each) + rng.normal(0, 0.1, documents * each)
        small = full + own + rng.normal(0, 0.05, documents * each)
        return difference(sample(small, documents, shares=False), sample(full, documents, shares=False), "mean")

    def single():
        return estimate(sample(rng.beta(4, 4, documents).repeat(each), documents), "mean")

    assert 0.92 <= covered(paired, 0.1, 600) <= 0.975
    assert 0.92 <= covered(single, 0.5, 600) <= 0.985


def test_the_bootstrap_of_many_documents_with_many_examples_covers() -> None:
    rng = np.random.default_rng(6)

    def draw():
        return estimate(sample(rng.normal(3, 1, 20).repeat(5), 20, shares=False), "mean")

    assert BOOTSTRAP_LEAST < 20
    assert 0.91 <= covered(draw, 3.0, 150) <= 0.99


def test_shares_stay_within_bounds_and_costs_have_no_ceiling() -> None:
    high = [0.95, 1.0, 0.4, 0.99]
    assert estimate(sample(high, 4), "mean").interval.high == 1.0
    assert estimate(sample(high, 4, shares=False), "mean").interval.high > 1.0
    assert estimate(sample(high, 4), "exp_weighted").interval.high > math.exp(1.0)


def test_perplexities_of_few_documents_are_paired_with_an_honest_width() -> None:
    rng, inside = np.random.default_rng(7), 0
    for _ in range(300):
        full, loss = rng.normal(2.8, 0.2, 4), rng.normal(0.05, 0.02, 4)
        weights = rng.integers(80, 120, 4)
        made = difference(sample(full + loss, 4, weights), sample(full, 4, weights), "exp_weighted")
        inside += math.exp(2.87 + 0.0002) * (1 - math.exp(-0.05)) in made.interval
    assert inside / 300 > 0.9


def test_fewer_than_five_documents_have_no_verdict() -> None:
    def verdict(documents: int) -> str:
        losses = np.linspace(2.7, 2.9, documents)
        table = points(perplexity("full", losses) + perplexity("int2", losses + 3.0))
        return str(table.set_index("stack").loc["int2", "vs_full"])

    assert [verdict(n) for n in (1, 2, 4)] == [TOO_FEW] * 3 == ["too few documents for a verdict"] * 3
    assert verdict(5) == "clearly below"


def test_few_documents_leave_it_open_whether_the_full_cache_beats_a_guess() -> None:
    def discriminative(scores) -> list[object]:
        return points([make(example_id=f"e{i}", score=float(s), chance=0.4) for i, s in enumerate(scores)])[
            "discriminative"
        ].tolist()

    assert discriminative([1, 1, 1, 1])[0] is pd.NA
    assert discriminative([0, 0, 1, 0]) == [False]
