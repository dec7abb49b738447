"""Uncertainty of scores and of paired differences; it knows arrays of numbers, not records, stacks or files.

Proportions get Wilson intervals, paired differences of proportions Newcombe's method 10 and the exact McNemar test, all
three over as many examples as the documents are worth where documents have several (`clusters`); everything else gets
Student's t or a bootstrap over documents. Every interval of finite scores is finite and has a width, also where the sample
shows no spread at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from statsmodels.stats.proportion import proportion_confint

from harness.analysis.clusters import (
    CONFIDENCE,
    Floats,
    Interval,
    cluster_interval,
    effective_size,
    group_totals,
    jackknife_p,
    paired,
    sign_flip_p,
)
from harness.analysis.sequences import sequence

Aggregate = Literal["mean", "exp_weighted"]

NOISE_HALF_WIDTH = 0.15  # "equal within noise" needs an interval at least this sharp
FEW_DOCUMENTS = 5  # fewer have no verdict: any two of them may happen to agree
EQUAL = "equal within noise"
TOO_FEW = "too few documents for a verdict"

UNKNOWN = Interval(math.nan, math.nan)


@dataclass(frozen=True)
class Sample:
    """Scores of one point in a fixed order of examples: three arrays of one length; groups are document ids.

    `shares` says that no score can leave 0..1: costs such as bits a byte may lie there too, but have no ceiling. `adaptive`:
    how many there are was decided while looking at them, and groups come in the order in which they were asked for.
    """

    scores: Floats
    weights: Floats
    groups: NDArray[np.object_]
    shares: bool = True
    adaptive: bool = False

    @property
    def is_proportion(self) -> bool:
        right_or_wrong = bool(np.isin(self.scores, (0.0, 1.0)).all())
        return right_or_wrong and bool((self.weights == self.weights[0]).all())

    def aggregate(self, how: Aggregate) -> float:
        """Weighted mean, or exp of it (perplexity from negative log-likelihoods per token, weight = tokens)."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.sum(self.scores * self.weights) / np.sum(self.weights)
            return float(np.exp(mean)) if how == "exp_weighted" else float(mean)


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; p_value only of a paired difference: exact (McNemar) for proportions, else by t."""

    value: float
    interval: Interval
    p_value: float = math.nan
    exact: bool = False
    documents: int | None = None  # that the interval rests on; None where that is not known


def wilson(successes: float, n: float) -> Interval:
    """Wilson score interval of a proportion; `successes` may be fractional."""
    low, high = proportion_confint(successes, n, alpha=1 - CONFIDENCE, method="wilson")
    share = successes / n  # rounding may leave a bound a hair inside an all-right or all-wrong sample
    return Interval(min(max(float(low), 0.0), share), max(min(float(high), 1.0), share))


def newcombe_paired(both: float, first_only: float, second_only: float, neither: float) -> Interval:
    """Interval of p1 - p2 from the paired 2 x 2 table (Newcombe 1998, Statistics in Medicine 17:2635, method 10).

    Wilson limits of the two marginal shares are squared and added with the correlation phi of the pairs; phi has the
    continuity correction n / 2 when positive. statsmodels has only the unpaired one in the supported versions.
    """
    n = both + first_only + second_only + neither
    first, second = both + first_only, both + second_only
    p1, p2 = first / n, second / n
    w1, w2 = wilson(first, n), wilson(second, n)
    covariance = both * neither - first_only * second_only
    covariance = max(covariance - n / 2, 0.0) if covariance > 0 else covariance
    spread = first * (n - first) * second * (n - second)
    phi = covariance / math.sqrt(spread) if spread > 0 else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low = p1 - p2 - reach(p1 - w1.low, w2.high - p2)
    high = p1 - p2 + reach(w1.high - p1, p2 - w2.low)
    return Interval(max(low, -1.0), min(high, 1.0))


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Two-sided exact McNemar p-value from the discordant pairs; 1 where there are none."""
    n = first_only + second_only
    return float(binomtest(first_only, n, 0.5).pvalue) if n else 1.0


def estimate(sample: Sample, how: Aggregate) -> Estimate:
    """Aggregate of one sample with its interval; a non-finite score gives a non-finite value and no interval."""
    value = sample.aggregate(how)
    if not math.isfinite(value):
        return Estimate(value, UNKNOWN)
    totals = group_totals(sample.groups, sample.scores * sample.weights, sample.weights)
    documents = totals.shape[1]
    if sample.adaptive and how == "mean" and _bounded(sample):
        return Estimate(
            value, _at_every_look(sample.groups, sample.scores, np.zeros_like(sample.scores), 0.0), documents=documents
        )
    if how == "mean" and sample.is_proportion:
        worth = effective_size(sample.scores, sample.groups)
        return Estimate(value, wilson(value * worth, worth), documents=documents)
    interval = cluster_interval(totals, lambda s: s[0] / s[1])
    if interval.half_width < _tiny(value):
        interval = _without_spread(sample, interval, documents)
    interval = _clipped(interval, 0.0) if how == "mean" and _bounded(sample) else interval
    return Estimate(value, _exp(interval) if how == "exp_weighted" else interval, documents=documents)


def difference(first: Sample, second: Sample, how: Aggregate) -> Estimate:
    """First minus second over the same examples in the same order, paired."""
    value = first.aggregate(how) - second.aggregate(how)
    if not math.isfinite(value):
        return Estimate(value, UNKNOWN)
    columns = (first.scores * first.weights, second.scores * second.weights, first.weights)
    totals = group_totals(first.groups, *columns)
    documents = totals.shape[1]
    if first.adaptive and how == "mean" and _bounded(first, second):
        interval = _at_every_look(first.groups, first.scores, second.scores, -1.0)
        return Estimate(value, interval, documents=documents)
    if how == "mean" and first.is_proportion and second.is_proportion:
        return Estimate(value, *_of_proportions(first, second, totals), exact=True, documents=documents)
    link = np.exp if how == "exp_weighted" else np.asarray
    interval = cluster_interval(totals, lambda s: link(s[0] / s[2]) - link(s[1] / s[2]))
    if interval.half_width < _tiny(second.aggregate(how)):
        interval = _without_difference(first, second, how, documents)
    interval = _clipped(interval, -1.0) if how == "mean" and _bounded(first, second) else interval
    p = jackknife_p(totals, lambda s: s[0] / s[2] - s[1] / s[2])
    return Estimate(value, interval, p, documents=documents)


def _at_every_look(groups: NDArray[np.object_], scores: Floats, base: Floats, low: float) -> Interval:
    """Interval that holds however often it was looked at: of what documents differ by from `base`, in the order of the groups.

    low: what no difference is below; none is above 1.
    """
    found = sequence(paired(zip(groups.tolist(), scores.tolist(), base.tolist(), strict=True)).differences, low, 1.0)
    mean = float((scores - base).mean())
    return Interval(min(found.low, mean), max(found.high, mean))


def _of_proportions(first: Sample, second: Sample, totals: Floats) -> tuple[Interval, float]:
    """Newcombe's interval over what the documents are worth, and the exact test that swaps whole documents."""
    one, two, n = first.scores == 1, second.scores == 1, len(first.scores)
    lost, won = int(np.sum(one & ~two)), int(np.sum(~one & two))
    share = effective_size(first.scores - second.scores, first.groups) / n
    interval = newcombe_paired(share * int(np.sum(one & two)), share * lost, share * won, share * int(np.sum(~one & ~two)))
    net = (totals[0] - totals[1]) / first.weights[0]
    return interval, mcnemar_exact(lost, won) if totals.shape[1] == n else sign_flip_p(net)


def verdict(score: Estimate, full: Estimate, paired: Estimate, *, higher_is_better: bool, relative: bool) -> str:
    """How a point compares with the full cache, in the words of tables and plots.

    "clearly below" compares the two intervals; "equal within noise" is a paired interval that contains 0 with a
    half-width of at most 0.15 (as a share of the full score where `relative`: a cost has no fixed scale);
    "below" and "above" are paired intervals on one side of 0; all else is "not resolved" at this n. Fewer than five
    documents have no verdict.
    """
    if not math.isfinite(paired.interval.half_width):
        return ""
    if paired.documents is not None and paired.documents < FEW_DOCUMENTS:
        return TOO_FEW
    sign = 1.0 if higher_is_better else -1.0
    worse_edge = score.interval.high if higher_is_better else score.interval.low
    full_edge = full.interval.low if higher_is_better else full.interval.high
    if sign * worse_edge < sign * full_edge:
        return "clearly below"
    if 0.0 in paired.interval:
        scale = abs(full.value) if relative else 1.0
        return EQUAL if paired.interval.half_width <= NOISE_HALF_WIDTH * scale else "not resolved"
    return "above" if sign * paired.value > 0 else "below"


def _tiny(value: float) -> float:
    return 1e-12 * max(abs(value), 1.0)


def _bounded(*samples: Sample) -> bool:
    return all(s.shares and bool(((s.scores >= 0) & (s.scores <= 1)).all()) for s in samples)


def _clipped(interval: Interval, least: float) -> Interval:
    return Interval(max(interval.low, least), min(interval.high, 1.0))


def _exp(interval: Interval) -> Interval:
    with np.errstate(over="ignore"):
        return Interval(float(np.exp(interval.low)), float(np.exp(interval.high)))


def _without_spread(sample: Sample, point: Interval, groups: int) -> Interval:
    """Scores in 0..1 vary no more than a coin of the same mean (Wilson); else the rule of three at their scale."""
    mean = sample.aggregate("mean")
    if _bounded(sample):
        return wilson(mean * groups, groups)
    reach = 3 * (abs(mean) or 1.0) / groups
    return Interval(point.low - reach, point.high + reach)


def _without_difference(first: Sample, second: Sample, how: Aggregate, groups: int) -> Interval:
    """No spread among the differences: Newcombe on the two means, or the rule of three at the spread of the scores."""
    one, two = first.aggregate(how), second.aggregate(how)
    if how == "mean" and _bounded(first, second):
        both, either = min(one, two), max(one, two)
        return newcombe_paired(groups * both, groups * (one - both), groups * (two - both), groups * (1 - either))
    spread = float(np.std(second.scores)) * (abs(two) if how == "exp_weighted" else 1.0)
    spread = spread if spread > _tiny(two) else 0.0
    reach = 3 * (spread or abs(two) or 1.0) / groups
    return Interval(one - two - reach, one - two + reach)
