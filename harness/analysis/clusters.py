"""What examples that share documents can tell: they are not independent, so documents are what is counted and resampled.

In arrays of numbers and the document of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import bootstrap, norm, t

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]  # (columns, resamples) totals to (resamples,) values

CONFIDENCE = 0.95
RESAMPLES = 2000
BOOTSTRAP_LEAST = 10  # documents; below, resampling is too narrow: with two of them it covers half of what it should


@dataclass(frozen=True)
class Interval:
    """A confidence interval; NaN on both sides where the score is not finite."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, eq=False)  # known by identity: arrays have no hash
class Units:
    """One value a unit (a document, whatever the seeds of its questions), over what an arm and the full cache both answered.

    Attributes:
        names: the units, in the order in which they were asked.
        losses: mean over the unit's questions of max(0, full - arm); for right and wrong answers the share of questions that
            the full cache answers right and the arm wrong, which bounds the net loss from above.
        differences: mean of arm - full.
    """

    names: tuple[str, ...]
    losses: Floats
    differences: Floats

    @property
    def n(self) -> int:
        """Units."""
        return len(self.names)

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or 1."""
        return bool(np.isin(self.losses, (0.0, 1.0)).all())


def paired(answers: Iterable[tuple[str, float, float]]) -> Units:
    """The units of questions, each as (unit, score of the arm, score of the full cache), in the order they first come."""
    found: dict[str, list[float]] = {}
    for unit, arm, full in answers:
        found.setdefault(unit, []).append(arm - full)
    every = [np.array(differences, dtype=np.float64) for differences in found.values()]
    losses, means = ([of.mean() for of in kind] for kind in ([np.maximum(-one, 0.0) for one in every], every))
    return Units(tuple(found), np.array(losses, dtype=np.float64), np.array(means, dtype=np.float64))


def group_totals(groups: NDArray[np.object_], *columns: Floats) -> Floats:
    """(columns, groups) sums of columns (examples,) within each document."""
    names, index = np.unique(groups.astype(str), return_inverse=True)
    return np.stack([np.bincount(index, weights=column, minlength=len(names)) for column in columns])


def effective_size(values: Floats, groups: NDArray[np.object_]) -> float:
    """How many independent examples say as much about the mean of `values` as these do, which share documents.

    Examples over the design effect 1 + (m - 1) rho (Kish 1965, Survey Sampling; m is the mean document size as an example
    sees it), rho from the analysis of variance (Ridout, Demetrio and Firth 1999, Biometrics 55:137) and at least 0, then
    over (t / z)^2 for the few documents that rho is estimated from (Korn and Graubard 1998, Survey Methodology 24:193). It
    never falls below what examples that are alike within documents are worth, and is just that where rho cannot be
    estimated: without any spread, or with one document. Without shared documents it is the number of examples.
    """
    sizes, sums, squares = group_totals(groups, np.ones(len(values)), values, values**2)
    n, documents = float(len(values)), len(sizes)
    if documents == n:
        return n
    seen_size = float(np.sum(sizes**2)) / n
    alike = n / seen_size
    if documents < 2:
        return alike
    between = float(np.sum(sums**2 / sizes) - np.sum(sums) ** 2 / n) / (documents - 1)
    within = float(np.sum(squares - sums**2 / sizes)) / (n - documents)
    typical = (n - seen_size) / (documents - 1)
    spread = between + (typical - 1) * within
    if spread <= 1e-12:
        return alike
    rho = min(max((between - within) / spread, 0.0), 1.0)
    few = float(norm.ppf(0.5 + CONFIDENCE / 2) / t.ppf(0.5 + CONFIDENCE / 2, documents - 1)) ** 2
    return max(few * n / (1 + (seen_size - 1) * rho), alike)


def sign_flip_p(net: Floats) -> float:
    """Two-sided p-value of Fisher's randomisation test on the documents' net counts of discordant pairs, whole numbers.

    Under the null hypothesis the two sides of a comparison may be swapped document by document; the p-value is the share
    of all 2^documents swaps whose total is as far from 0. With one example a document this is the exact McNemar test.
    """
    steps = np.abs(np.rint(net)).astype(int)
    observed, reach = abs(int(np.rint(net).sum())), int(steps.sum())
    chances = np.zeros(2 * reach + 1)  # of every total from -reach to reach
    chances[reach] = 1.0
    for step in steps[steps > 0]:
        chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2
    totals = np.arange(-reach, reach + 1)
    return min(float(chances[np.abs(totals) >= observed].sum()), 1.0)


def cluster_interval(totals: Floats, statistic: Statistic) -> Interval:
    """Interval of a statistic of document totals: Student's t for few documents, else the bootstrap.

    Args:
        totals: (columns, groups) sums within each document, so that a resample of documents is a sum of columns.
        statistic: maps (columns, resamples) totals to (resamples,) values.

    Returns:
        A zero width where documents do not differ, or where there is only one: the callers widen it.
    """
    return _jackknife(totals, statistic) if totals.shape[1] < BOOTSTRAP_LEAST else _bootstrap(totals, statistic)


def _jackknife(totals: Floats, statistic: Statistic) -> Interval:
    """Student's t with the delete-one-document variance, as in MacKinnon, Nielsen and Webb 2023 (J. Econometrics 232:272)."""
    point, error = _with_error(totals, statistic)
    groups = totals.shape[1]
    reach = error * float(t.ppf(0.5 + CONFIDENCE / 2, groups - 1)) if groups > 1 else 0.0
    return Interval(point - reach, point + reach)


def jackknife_p(totals: Floats, statistic: Statistic) -> float:
    """Two-sided p-value of "the statistic is 0" by the same t; NaN for one document, or where all differ alike."""
    point, error = _with_error(totals, statistic)
    groups = totals.shape[1]
    if groups < 2:
        return math.nan
    if error <= 1e-12 * max(1.0, abs(point)):
        return 1.0 if abs(point) <= 1e-12 else math.nan
    return 2 * float(t.sf(abs(point) / error, groups - 1))


def _with_error(totals: Floats, statistic: Statistic) -> tuple[float, float]:
    """The statistic of all documents, and its standard error; 0 for one document."""
    groups = totals.shape[1]
    whole = totals.sum(axis=1, keepdims=True)
    point = float(statistic(whole)[0])
    if groups < 2:
        return point, 0.0
    without = statistic(whole - totals)
    return point, math.sqrt((groups - 1) / groups * float(np.sum((without - without.mean()) ** 2)))


def _bootstrap(totals: Floats, statistic: Statistic) -> Interval:
    """Expanded percentile bootstrap.

    The nominal level is widened as in Hesterberg 2015 (The American Statistician 69:371): plain percentiles are too narrow
    by sqrt((g - 1) / g) and use z where t is due.
    """
    groups = totals.shape[1]
    point = float(statistic(totals.sum(axis=1, keepdims=True))[0])
    tail = ndtr(-math.sqrt(groups / (groups - 1)) * t.ppf(0.5 + CONFIDENCE / 2, groups - 1))

    def resampled(*columns: Floats, axis: int) -> Floats:
        return statistic(np.stack([column.sum(axis=axis) for column in columns]))

    result = bootstrap(
        tuple(totals),
        resampled,
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=1 - 2 * tail,
        n_resamples=RESAMPLES,
        random_state=0,  # the same records give the same interval
    ).confidence_interval
    return Interval(min(float(result.low), point), max(float(result.high), point))
