"""Intervals and p-values that may be looked at after every unit keep their word, by simulation and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.sequences import anytime_p, sequence
from harness.evaluation.adaptive import resolved, rounds

RUNS = 300


def differences(rng: np.random.Generator, loss: float, n: int) -> np.ndarray:
    """Right and wrong answers of an arm minus those of the full cache: some are lost, a few are won."""
    lost, won = rng.random(n) < loss + 0.02, rng.random(n) < 0.02
    return won.astype(float) - (lost & ~won)


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_an_interval_covers_at_every_look(loss: float) -> None:
    """The intersection over all looks is returned, so one that missed at any look misses at the end."""
    rng = np.random.default_rng(0)
    truth = 0.02 - (loss + 0.02) * 0.98
    covered = [truth in sequence(differences(rng, loss, 300), -1, 1) for _ in range(RUNS)]
    assert np.mean(covered) >= 0.95


def test_an_interval_only_ever_narrows() -> None:
    values = np.random.default_rng(1).random(120)
    before = sequence(values[:0])
    assert (before.low, before.high) == (0.0, 1.0)
    for n in range(1, 120):
        now = sequence(values[:n])
        assert before.low <= now.low <= now.high <= before.high
        before = now


def test_the_stopping_rule_covers_and_saves_half() -> None:
    """Arms whose true differences are 0 to 0.3, stopped one by one: against giving all the units of the slowest, half is saved."""
    rng = np.random.default_rng(2)
    pool, covered, shares = 1500, [], []
    for _ in range(8):
        took = []
        for loss in np.linspace(0.0, 0.3, 13):
            found = differences(rng, float(loss), pool)
            n = next((n for n in rounds(pool) if resolved(found[:n], 0.05)), pool)
            took.append(n)
            covered.append(0.02 - (loss + 0.02) * 0.98 in sequence(found[:n], -1, 1))
        shares.append(np.median(took) / max(took))
    assert np.mean(covered) >= 0.95
    assert np.mean(shares) <= 0.5


def test_a_limit_is_excluded_rarely_where_it_is_not_kept() -> None:
    """Losses of exactly 0.02, looked at after every unit: at most one in twenty is ever called below it."""
    rng = np.random.default_rng(3)
    wrong = [anytime_p((rng.random(800) < 0.02).astype(float), 0.02) <= 0.05 for _ in range(1000)]
    assert np.mean(wrong) <= 0.06


def test_without_any_loss_a_limit_needs_a_few_more_units_than_the_exact_test() -> None:
    assert anytime_p(np.zeros(162), 0.02) > 0.05 >= anytime_p(np.zeros(163), 0.02)
    assert anytime_p(np.zeros(0), 0.02) == 1.0
    assert anytime_p(np.full(50, 0.5), 0.02) == 1.0
