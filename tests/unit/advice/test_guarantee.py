"""A choice with a guarantee: exact numbers, and a thousand tables of which at most one in twenty may be chosen wrongly."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from harness.advice.guarantee import Candidate, choose, hoeffding_bentkus, least_units, needed_units, p_value
from harness.analysis.clusters import Units


def units(losses: object) -> Units:
    values = np.asarray(losses, dtype=np.float64)
    return Units(tuple(map(str, range(len(values)))), values, -values)


def test_149_units_without_a_loss_are_the_least_at_two_percent() -> None:
    assert least_units(0.02, 0.05) == 149
    assert p_value(units(np.zeros(149)), 0.02, peeked=False) <= 0.05 < p_value(units(np.zeros(148)), 0.02, peeked=False)
    assert needed_units(None, 0.02, 0.05) == 149
    assert needed_units(units([0.0, 1.0]), 0.02, 0.05) is None


def test_binary_losses_are_tested_exactly() -> None:
    losses = np.zeros(400)
    losses[:3] = 1
    assert p_value(units(losses), 0.02, peeked=False) == pytest.approx(sum(binom.pmf(k, 400, 0.02) for k in range(4)))


def test_graded_losses_are_bounded_by_hoeffding_and_bentkus() -> None:
    """Never below the exact test of coins with the same mean, and valid for losses that are not coins."""
    losses = np.full(300, 0.005)
    assert hoeffding_bentkus(losses, 0.02) == pytest.approx(
        min(np.exp(-300 * _entropy(0.005, 0.02)), np.e * binom.cdf(2, 300, 0.02))
    )
    assert hoeffding_bentkus(np.full(300, 0.03), 0.02) == 1.0
    rng = np.random.default_rng(0)
    wrong = [hoeffding_bentkus(rng.beta(0.1, 4.9, 400), 0.02) <= 0.05 for _ in range(500)]
    assert np.mean(wrong) <= 0.05


def _entropy(a: float, b: float) -> float:
    return float(a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)))


@pytest.mark.parametrize("peeked", [False, True])
def test_the_chosen_point_is_wrong_in_at_most_one_table_of_twenty(peeked: bool) -> None:
    """1,000 tables of eight points whose true losses grow as bytes fall; some cross the limit just behind a good one."""
    rng = np.random.default_rng(4)
    truths = np.array([0.0, 0.002, 0.005, 0.01, 0.02, 0.021, 0.05, 0.3])
    wrong = 0
    for _ in range(1000):
        order = truths if rng.random() < 0.5 else rng.permutation(truths)
        chains = rng.choice(["a", "b", "c"], 8) if rng.random() < 0.5 else ["a"] * 8
        table = [
            Candidate(str(i), 100.0 - i, units(rng.random(500) < truth), chain)
            for i, (truth, chain) in enumerate(zip(order, chains, strict=True))
        ]
        chosen = choose(table, 0.02, 0.95, peeked=peeked).chosen
        wrong += chosen is not None and order[int(chosen.label)] > 0.02
    assert wrong <= 50


def test_a_stack_is_tested_from_the_most_bytes_and_stops_at_its_first_failure() -> None:
    good, bad = units(np.zeros(200)), units(np.ones(200))
    table = [Candidate("cheap", 1, good), Candidate("dear", 3, good), Candidate("middle", 2, bad)]
    found = choose(table, 0.02, 0.95, peeked=False)
    assert [one.label for one in found.passed] == ["dear"]
    assert [test.candidate.label for test in found.failed] == ["middle"]
    assert [one.label for one in found.untested] == ["cheap"]


def test_stacks_share_the_error_and_hand_it_on() -> None:
    """Two stacks have half of it each: 183 units without a loss; once one has passed, the other has all of it, 149."""
    plenty, enough, bad = units(np.zeros(183)), units(np.zeros(149)), units(np.ones(200))
    both = choose([Candidate("x", 2, plenty, "x"), Candidate("y", 1, enough, "y")], 0.02, 0.95, peeked=False)
    assert [one.label for one in both.passed] == ["x", "y"]
    one_fails = choose([Candidate("x", 2, bad, "x"), Candidate("y", 1, enough, "y")], 0.02, 0.95, peeked=False)
    assert one_fails.chosen is None
    assert {test.candidate.label: test.error for test in one_fails.failed} == pytest.approx({"x": 0.025, "y": 0.025})


def test_thin_evidence_gives_no_guarantee() -> None:
    assert choose([Candidate("int8", 1, units(np.zeros(120)))], 0.02, 0.95, peeked=False).chosen is None
    assert choose([Candidate("int8", 1, None)], 0.02, 0.95, peeked=False).chosen is None
