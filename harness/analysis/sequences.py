"""Intervals and p-values that stay valid however often they are looked at, for means of bounded values.

Bets on the mean (Waudby-Smith and Ramdas 2024, J. Royal Statistical Society B 86:1, arXiv 2010.09686): the capital of a gambler
who bets against a candidate mean is a nonnegative martingale when it is the mean, so by Ville's inequality it ever reaches
1 / alpha with a chance of at most alpha. Written here, as no kept library has it: confseq needs a C++ build and has no wheels.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from harness.analysis.clusters import CONFIDENCE, Interval

Floats = NDArray[np.float64]

GRID = 1001  # candidate means; the interval is widened by one step to either side
TRUNCATION = 0.75  # a bet on a mean never risks more than this share of the capital
BETS = np.array([0.9999, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05])  # on a limit: shares of the largest bet
SHARES = np.array([0.7, *[0.3 / 8] * 8])  # of the capital, for each of them


def sequence(values: Floats, low: float = 0.0, high: float = 1.0, confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean of values in [low, high], seen one after another, all looks at once.

    The hedged capital process with predictable plug-in bets; the running intersection of all steps is returned, so it never
    grows as values come in. Without values it is [low, high].

    Args:
        values: (n,) independent values in the order in which they were seen.
        low: what no value is below.
        high: what no value is above.
        confidence: that the mean is inside at every step.
    """
    x = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    alpha = 1 - confidence
    means = np.linspace(0.0, 1.0, GRID)
    bets = _bets(x, alpha)
    up, down = _log_capital(x, means, bets, 1.0), _log_capital(x, means, bets, -1.0)
    # Half the capital on either side: their mean is a martingale, and the larger half is at most that.
    kept = means[(np.maximum(up, down) + math.log(0.5)) < math.log(1 / alpha)]
    if not len(kept):  # only where values are not independent of order: the mean of all stays
        kept = np.array([x.mean()])
    step = 1 / (GRID - 1)
    ends = max(float(kept.min()) - step, 0.0), min(float(kept.max()) + step, 1.0)
    return Interval(low + ends[0] * (high - low), low + ends[1] * (high - low))


def _bets(x: Floats, alpha: float) -> Floats:
    """Predictable plug-in bets: from the mean and variance of the values before each (paper, equation 26)."""
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    before = np.append(0.25, variance[:-1])[: len(x)]
    return np.sqrt(2 * math.log(2 / alpha) / (before * t * np.log1p(t)))


def _log_capital(x: Floats, means: Floats, bets: Floats, sign: float) -> Floats:
    """The most that the capital ever was, of bets that each candidate mean (m,) is too low (sign 1) or too high (-1)."""
    room = np.maximum(means if sign > 0 else 1 - means, 1e-12)
    sizes = np.minimum(bets[:, None], TRUNCATION / room)
    growth = np.log1p(sign * sizes * (x[:, None] - means))
    return np.asarray(np.max(np.cumsum(growth, axis=0), axis=0, initial=0.0))


def anytime_p(losses: Floats, limit: float) -> float:
    """p-value of "the mean loss is above `limit`", valid at any number of looks.

    Several gamblers bet on losses below the limit, each a constant share of the largest bet; their pooled capital is a
    martingale where the mean is the limit. The boldest holds most of it: without any loss a limit of 0.02 is excluded at 0.05
    after 163 units (149 by the exact test at one fixed number). The others win where losses are rare but there.

    Args:
        losses: (n,) values in [0, 1] in the order in which they were seen.
        limit: above 0 and below 1.
    """
    x = np.asarray(losses, dtype=np.float64)
    bets = BETS / (1 - limit)  # at a loss of 1 a bet of 1 / (1 - limit) leaves nothing
    wealth = np.cumsum(np.log1p(bets * (limit - x[:, None])), axis=0)
    pooled = np.logaddexp.reduce(wealth + np.log(SHARES), axis=1)
    return float(min(1.0, np.exp(-np.max(pooled, initial=0.0))))
