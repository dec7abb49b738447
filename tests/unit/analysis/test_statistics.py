"""Intervals against published worked examples, on degenerate samples, and by simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.analysis.intervals import (
    Estimate,
    Interval,
    Sample,
    difference,
    estimate,
    mcnemar_exact,
    newcombe_paired,
    verdict,
    wilson,
)
from harness.analysis.point_row import Comparison


def sample(scores, weights=None, groups=None) -> Sample:
    scores = np.asarray(scores, dtype=float)
    weights = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=float)
    groups = np.arange(len(scores)).astype(object) if groups is None else np.asarray(groups, dtype=object)
    return Sample(scores, weights, groups)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_limits_of_newcombe_1998_table_1(right: int, n: int, low: float, high: float) -> None:
    interval = wilson(right, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("table", "low", "high", "tolerance"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404, 5e-5),  # Newcombe 1998, paired data
        ((1, 1, 7, 12), -0.507, -0.026, 5e-4),  # airway hyper-responsiveness, Bentur 2009 in Fagerland 2014
        ((14, 5, 0, 22), 0.011, 0.226, 5e-4),  # Altman, Statistics with Confidence, table 6.2
    ],
)
def test_newcombe_paired_gives_published_limits(table, low: float, high: float, tolerance: float) -> None:
    interval = newcombe_paired(*table)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=tolerance)


def test_newcombe_paired_is_antisymmetric_and_ignores_which_outcome_is_called_right() -> None:
    a = newcombe_paired(20, 12, 2, 16)
    swapped, flipped = newcombe_paired(20, 2, 12, 16), newcombe_paired(16, 2, 12, 20)
    assert (a.low, a.high) == pytest.approx((-swapped.high, -swapped.low))
    assert (flipped.low, flipped.high) == pytest.approx((swapped.low, swapped.high))


@pytest.mark.parametrize(("lost", "won", "p"), [(0, 0, 1.0), (1, 7, 2 * 9 / 256), (5, 5, 1.0), (8, 0, 2 / 256)])
def test_mcnemar_is_the_exact_binomial_tail(lost: int, won: int, p: float) -> None:
    assert mcnemar_exact(lost, won) == pytest.approx(p)


@pytest.mark.parametrize("n", [1, 2, 20])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, 3.7, -2.0])
@pytest.mark.parametrize("how", ["mean", "exp_weighted"])
def test_samples_without_spread_get_finite_intervals_with_a_width(n: int, value: float, how) -> None:
    one = sample([value] * n)
    for found in (estimate(one, how), difference(one, one, how)):
        assert math.isfinite(found.interval.low)
        assert math.isfinite(found.interval.high)
        assert found.interval.half_width > 1e-3
        assert found.value in found.interval


def test_one_document_still_gives_an_interval() -> None:
    found = estimate(sample([0.2, 0.5, 0.9, 0.4], groups=["a"] * 4), "mean")
    assert 0.02 < found.interval.half_width < 0.5


def test_perplexity_is_exp_of_the_token_weighted_mean() -> None:
    found = estimate(sample([2.0, 3.0], weights=[300, 100]), "exp_weighted")
    assert found.value == pytest.approx(math.exp(2.25))
    assert found.value != pytest.approx((math.exp(2) + math.exp(3)) / 2)


def test_non_finite_scores_have_no_interval_and_make_no_warning() -> None:
    for scores in ([math.inf, 1.0], [800.0, 900.0]):
        found = estimate(sample(scores), "exp_weighted")
        assert math.isinf(found.value)
        assert math.isnan(found.interval.low)
    assert math.isnan(difference(sample([800.0]), sample([900.0]), "exp_weighted").value)


def test_the_same_sample_gives_the_same_interval() -> None:
    scores = np.random.default_rng(1).random(30)
    assert estimate(sample(scores), "mean") == estimate(sample(scores), "mean")


def test_resampling_documents_is_wider_than_resampling_records_of_alike_documents() -> None:
    scores = np.repeat(np.random.default_rng(2).random(8), 10)
    by_document = estimate(sample(scores, groups=np.repeat(np.arange(8), 10)), "mean").interval
    by_record = estimate(sample(scores), "mean").interval
    assert by_document.half_width > 2 * by_record.half_width


def test_bootstrap_of_few_documents_covers_the_mean() -> None:
    rng, covered = np.random.default_rng(3), 0
    for _ in range(200):
        covered += 0.5 in estimate(sample(rng.beta(2, 2, size=8)), "mean").interval
    assert 0.90 <= covered / 200 <= 0.995  # plain percentiles: about 0.87


def test_pairing_sharpens_a_difference() -> None:
    rng = np.random.default_rng(4)
    full = rng.normal(2.8, 0.5, size=40)
    found = difference(sample(full + 0.05 + rng.normal(0, 0.01, 40)), sample(full), "exp_weighted")
    assert 0 < found.interval.low < found.value < found.interval.high
    assert found.interval.half_width < estimate(sample(full), "exp_weighted").interval.half_width / 5


def test_paired_proportions_use_newcombe_and_mcnemar() -> None:
    stack, full = [1] * 14 + [1] * 5 + [0] * 22, [1] * 14 + [0] * 5 + [0] * 22
    found = difference(sample(stack), sample(full), "mean")
    assert found.value == pytest.approx(5 / 41)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.011, 0.226), abs=5e-4)
    assert found.p_value == pytest.approx(2 / 32)


def judge(score, full, paired, *, higher: bool = True, relative: bool = False) -> str:
    def made(low: float, high: float) -> Estimate:
        return Estimate((low + high) / 2, Interval(low, high))

    return verdict(made(*score), made(*full), made(*paired), higher_is_better=higher, relative=relative)


def test_verdicts_are_those_of_the_contract() -> None:
    assert judge((0.8, 1.0), (0.85, 1.0), (-0.12, 0.1)) == "equal within noise"
    assert judge((0.5, 1.0), (0.6, 1.0), (-0.3, 0.2)) == "not resolved"
    assert judge((0.1, 0.4), (0.6, 1.0), (-0.7, -0.4)) == "clearly below"
    assert judge((0.6, 0.9), (0.8, 1.0), (-0.2, -0.02)) == "below"
    assert judge((0.6, 0.9), (0.4, 0.7), (0.02, 0.3)) == "above"
    assert judge((30.0, 40.0), (14.0, 18.0), (15.0, 25.0), higher=False, relative=True) == "clearly below"
    assert judge((14.5, 18.5), (14.0, 18.0), (-1.0, 1.0), higher=False, relative=True) == "equal within noise"
    assert verdict(*[Estimate(math.nan, Interval(math.nan, math.nan))] * 3, higher_is_better=True, relative=False) == ""


def test_perplexities_are_judged_by_their_difference_in_nats() -> None:
    """The kind: a verdict on another quantity than the difference that is printed beside it."""

    def made(value: float, low: float, high: float) -> Estimate:
        return Estimate(value, Interval(low, high))

    scores = made(20.0, 14.0, 30.0), made(17.0, 12.0, 26.0)
    wide, nats = made(3.0, -0.2, 8.1), made(0.16, 0.07, 0.17)
    assert Comparison(*scores, wide, nats=nats).verdict(higher_is_better=False) == "below"
    assert Comparison(*scores, wide, nats=made(0.01, -0.02, 0.05)).verdict(higher_is_better=False) == "equal within noise"
    assert Comparison(*scores, wide, nats=made(0.1, -0.2, 0.4)).verdict(higher_is_better=False) == "not resolved"
    unknown = Estimate(math.inf, Interval(math.nan, math.nan))
    assert Comparison(*scores, unknown, "a score is not finite", nats=nats).verdict(higher_is_better=False) == ""
