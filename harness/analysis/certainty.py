"""How sure a table of points is: p-values of many comparisons, what a sample can see, places on the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from statsmodels.stats.multitest import multipletests

from harness.analysis.frontier import GROUP, non_dominated
from harness.analysis.intervals import newcombe_paired
from harness.analysis.point_measures import number
from harness.analysis.point_row import configurations, document_of

Floats = NDArray[np.float64]
Record = Mapping[str, Any]

RESAMPLES = 500


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
    as a share. For other scores: the half-width of the paired interval, in nats for perplexities. Missing where there is no
    comparison.
    """
    shares = {n: _least_lost(n) / n for n in {int(n) for n in points["n_documents"]} if n}
    answers = points["mcnemar_p"].notna()
    half = (points["nll_diff_hi"] - points["nll_diff_lo"]).fillna(points["diff_hi"] - points["diff_lo"]) / 2
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


def frontier_chance(ranked: pd.DataFrame, records: Iterable[Record]) -> pd.Series[float]:
    """For each ranked point the share of resamples of documents (the same for all points of a panel) with it on the frontier.

    Missing for points that are not ranked, and in panels of fewer than two documents. The records must be those that the table
    is of; the same records give the same shares.
    """
    found = pd.Series(math.nan, index=ranked.index, dtype="float64")
    kept = ranked[ranked["left_out"].isna()]
    places = {_place(row): index for index, row in zip(kept.index, kept.to_dict("records"), strict=True)}
    panels: dict[tuple[Any, ...], list[tuple[Any, list[Record]]]] = {}
    for point in configurations(records):
        first = point.first
        index = places.get((*(first[name] for name in GROUP), point.label))
        if index is not None:
            panels.setdefault(tuple(first[name] for name in GROUP), []).append((index, list(point.scored.values())))
    for panel in panels.values():
        shares = _shares([scored for _, scored in panel])
        if shares is not None:
            found.loc[[index for index, _ in panel]] = shares
    return found


def _place(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    return (*(row[name] for name in GROUP), row["label"])


def _shares(points: list[list[Record]]) -> Floats | None:
    """The share of resamples in which each point is on the frontier."""
    documents = {name: i for i, name in enumerate(dict.fromkeys(document_of(r) for scored in points for r in scored))}
    n = len(documents)
    if n < 2:
        return None
    scores, weights, sizes, counts = (np.zeros((len(points), n)) for _ in range(4))
    for i, scored in enumerate(points):
        for record in scored:
            j, weight = documents[document_of(record)], float(record["weight"])
            scores[i, j] += weight * number(record["score"])
            weights[i, j] += weight
            sizes[i, j] += number(record["kv_bytes_context"])
            counts[i, j] += 1
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (draws @ scores.T) / (draws @ weights.T)  # exp of it, for perplexity, has the same order
        cost = (draws @ sizes.T) / (draws @ counts.T)
    higher = bool(points[0][0]["higher_is_better"])
    on = np.zeros(len(points))
    for score, nbytes in zip(mean, cost, strict=True):
        usable = np.isfinite(score) & np.isfinite(nbytes)
        on[usable] += non_dominated(_rounded(nbytes[usable]), _rounded(score[usable]), higher_is_better=higher)
    return on / RESAMPLES


def _rounded(values: Floats) -> Floats:
    """Twelve digits: sums in another order must not make two equal scores a little unequal."""
    with np.errstate(divide="ignore"):
        digits = 11 - np.floor(np.log10(np.maximum(np.abs(values), 1e-300)))
    scale = 10.0 ** np.clip(digits, -300, 300)
    return np.asarray(np.where(values == 0, 0.0, np.round(values * scale) / scale), dtype=np.float64)
