"""The cheapest point whose loss is below a limit, with a guarantee that holds for the choice too.

Learn then test (Angelopoulos et al. 2021, arXiv 2110.01052): points are tested in an order that no score decides. The points of
one stack are a chain, from the most bytes to the fewest, and its first failure ends it. The error is divided equally over the
chains; what a chain that passed to its end had goes to those that are left (Bretz et al. 2009, Statistics in Medicine 28:586),
so one stack alone is tested at the whole error. The chance that any point that passed loses more than the limit is at most
1 - confidence, whatever is chosen among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from harness.analysis.clusters import Units
from harness.analysis.sequences import Floats, anytime_p


@dataclass(frozen=True)
class Candidate:
    """A point that may be chosen: its label, its bytes, its units (None without evidence), and the stack it is a point of."""

    label: str
    nbytes: float
    units: Units | None
    stack: str = ""


@dataclass(frozen=True)
class Test:
    """The test that ended a chain. p_value: of "its mean loss is above the limit"; error: what it would have had to be."""

    candidate: Candidate
    p_value: float
    error: float


@dataclass(frozen=True)
class Choice:
    """What the tests came to.

    Attributes:
        passed: in the order in which they did.
        failed: where each chain that did not pass to its end stopped.
        untested: behind those.
    """

    passed: tuple[Candidate, ...]
    failed: tuple[Test, ...]
    untested: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest that passed; None where there is no guarantee for any."""
        return min(self.passed, key=lambda one: (one.nbytes, one.label), default=None)


def choose(candidates: Sequence[Candidate], limit: float, confidence: float, *, peeked: bool) -> Choice:
    """Test the candidates.

    Args:
        candidates: without the full cache, which loses nothing by definition.
        limit: of the mean loss, above 0 and below 1.
        confidence: that nothing that passes loses more.
        peeked: whether the number of units was decided while looking at them; only anytime-valid p-values count then.
    """
    values = {one.label: 1.0 if one.units is None else p_value(one.units, limit, peeked=peeked) for one in candidates}
    return choose_by(candidates, values, confidence)


def choose_by(candidates: Sequence[Candidate], values: Mapping[str, float], confidence: float) -> Choice:
    """The same from p-values by label, which are unique: several tasks have one for all of them, their largest."""
    chains: dict[str, list[Candidate]] = {}
    for one in sorted(candidates, key=lambda one: (-one.nbytes, one.label)):
        chains.setdefault(one.stack, []).append(one)
    error = dict.fromkeys(chains, (1 - confidence) / max(1, len(chains)))
    passed: list[Candidate] = []
    while moving := [name for name, chain in chains.items() if chain and values[chain[0].label] <= error[name]]:
        passed.append(chains[moving[0]].pop(0))
        if not chains[moving[0]]:
            _hand_on(moving[0], chains, error)
    ended = [(name, chain) for name, chain in chains.items() if chain]
    failed = tuple(Test(chain[0], values[chain[0].label], error[name]) for name, chain in ended)
    return Choice(tuple(passed), failed, tuple(one for _, chain in ended for one in chain[1:]))


def _hand_on(name: str, chains: Mapping[str, Sequence[Candidate]], error: dict[str, float]) -> None:
    """Divide what a finished chain had over those that are left."""
    left = [other for other, chain in chains.items() if chain]
    for other in left:
        error[other] += error[name] / len(left)
    error[name] = 0.0


def p_value(units: Units, limit: float, *, peeked: bool) -> float:
    """p-value of "the mean loss of a unit is above `limit`"; 1 without units."""
    if not units.n:
        return 1.0
    if peeked:
        return anytime_p(units.losses, limit)
    if units.binary:
        return float(binom.cdf(int(units.losses.sum()), units.n, limit))
    return hoeffding_bentkus(units.losses, limit)


def hoeffding_bentkus(losses: Floats, limit: float) -> float:
    """p-value of a mean above `limit` of independent losses in [0, 1] (Bates et al. 2021, arXiv 2101.02703, proposition 5)."""
    n, mean = len(losses), float(np.mean(losses))
    if mean >= limit:
        return 1.0
    entropy = (mean * math.log(mean / limit) if mean else 0.0) + (1 - mean) * math.log((1 - mean) / (1 - limit))
    bentkus = math.e * float(binom.cdf(math.ceil(n * mean), n, limit))
    return min(1.0, math.exp(-n * entropy), bentkus)


def least_units(limit: float, error: float) -> int:
    """The fewest units that can pass a test at this error, all without a loss: 149 at 0.02 and 0.05."""
    return math.ceil(math.log(error) / math.log(1 - limit))


def needed_units(units: Units | None, limit: float, error: float) -> int | None:
    """Units that would pass a test at this error if the share of losses stays; None where it is not below the limit."""
    share = float(units.losses.mean()) if units is not None and units.n else 0.0
    if share >= limit:
        return None
    n = least_units(limit, error)
    while binom.cdf(math.ceil(share * n), n, limit) > error:
        n = math.ceil(n * 1.05)
    return n
