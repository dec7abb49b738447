"""What many comparisons at once do to p-values, and what a sample of this size can see at all."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests

from harness.analysis.frontier import GROUP
from harness.analysis.intervals import newcombe_paired


def holm(points: pd.DataFrame) -> pd.Series[float]:
    """`paired_p` of each point adjusted for all points of its run and mode (Holm 1979); missing where there is none.

    An adjusted p of at most 0.05 holds whichever of the points one looks at; the raw one only for a point named beforehand.
    """
    found = pd.Series(math.nan, index=points.index, dtype="float64")
    for _, group in points.groupby(list(GROUP), sort=False):
        known = group["paired_p"].dropna()
        if len(known):
            found.loc[known.index] = multipletests(known.to_numpy(), method="holm")[1]
    return found


def detectable(points: pd.DataFrame) -> pd.Series[float]:
    """The smallest loss against the full cache that each point's sample could have shown.

    For right and wrong answers: the fewest lost of so many documents, none won, whose interval (Newcombe) excludes 0,
    as a share. For other scores: the half-width of the paired interval. Missing where there is no comparison.
    """
    shares = {n: _least_lost(n) / n for n in {int(n) for n in points["n_documents"]} if n}
    answers = points["mcnemar_p"].notna()
    half = (points["diff_hi"] - points["diff_lo"]) / 2
    found = points["n_documents"].map(shares).where(answers, half)
    return found.where(np.isfinite(points["diff_to_full"])).astype("float64")


def _least_lost(n: int) -> int:
    """By bisection: more lost answers only move the interval away from 0."""
    low, high = 1, n
    while low < high:
        middle = (low + high) // 2
        if newcombe_paired(n - middle, 0, middle, 0).high < 0:
            high = middle
        else:
            low = middle + 1
    return low
