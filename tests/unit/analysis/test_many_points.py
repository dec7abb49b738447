"""What many points and few documents leave of a verdict: Holm, the smallest loss seen, the chance of a place, joint frontiers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from harness.analysis.findings import findings
from harness.analysis.intervals import newcombe_paired, wilson
from harness.analysis.labels import family_of
from tests.support.record_factory import make

EXACT = {"_target_": "harness.stages.codec.exact.Exact"}
INT8 = {"_target_": "harness.stages.codec.int8.Int8"}


def run(scores: dict[str, list[float]], sizes: dict[str, int], **more: object) -> list[dict[str, object]]:
    """Records of stacks on documents d0, d1, ...; the full cache is always right."""
    found = []
    for stack, values in scores.items():
        for i, score in enumerate(values):
            config = {"keep": None, "keys": EXACT if stack == "full" else INT8, "values": EXACT}
            size = {"kv_bytes_context": sizes[stack], "kv_bytes_full": sizes["full"]}
            named = {"example_id": f"d{i}", "group_id": f"d{i}", "stack": stack, "stack_config": config | {"of": stack}}
            found.append(make(**named, score=score, **size, **more))
    return found


def by_stack(points: pd.DataFrame, column: str) -> dict[str, float]:
    return dict(zip(points["stack"], points[column], strict=True))


def test_holm_multiplies_the_smallest_p_by_the_number_of_points() -> None:
    """Exact McNemar: 6 of 20 lost is p = 2 / 2^6, 8 lost 2 / 2^8; the smaller is doubled, the larger stays."""
    lose = lambda k: [0.0] * k + [1.0] * (20 - k)  # noqa: E731
    records = run({"full": [1.0] * 20, "a": lose(6), "b": lose(8)}, {"full": 100, "a": 50, "b": 40})
    points = findings(records).points
    assert by_stack(points, "paired_p")["a"] == 2 / 2**6
    holm = by_stack(points, "holm_p")
    assert (holm["a"], holm["b"]) == (2 / 2**6, 2 * 2 / 2**8)
    assert math.isnan(holm["full"])


def test_a_graded_score_has_a_p_value_too() -> None:
    rng = np.random.default_rng(0)
    records = run({"full": [1.0] * 12, "a": (1 - rng.random(12) * 0.1).tolist()}, {"full": 100, "a": 50})
    assert 0 < by_stack(findings(records).points, "paired_p")["a"] < 0.01
    assert math.isnan(by_stack(findings(records).points, "mcnemar_p")["a"])


def test_detectable_is_the_fewest_lost_that_would_have_shown() -> None:
    records = run({"full": [1.0] * 20, "a": [1.0] * 20}, {"full": 100, "a": 50})
    least = by_stack(findings(records).points, "detectable")["a"]
    k = round(least * 20)
    assert newcombe_paired(20 - k, 0, k, 0).high < 0 <= newcombe_paired(20 - k + 1, 0, k - 1, 0).high


def test_chance_of_a_place_is_that_of_the_documents() -> None:
    """The dearer one is right on one document more. It is on the frontier unless a resample misses that document: 1 - (1 - 1/n)^n."""
    n = 8
    records = run({"full": [1.0] * n, "a": [1.0] * n, "b": [0.0] + [1.0] * (n - 1)}, {"full": 100, "a": 60, "b": 50})
    chance = by_stack(findings(records).points, "p_frontier")
    assert chance["b"] == 1.0
    assert chance["a"] == pytest.approx(1 - (1 - 1 / n) ** n, abs=0.07)
    assert chance["full"] == 0.0


def test_joint_frontiers_rank_what_every_task_measured() -> None:
    sizes = {"full": 100, "a": 50, "b": 40, "c": 30}
    first = run({"full": [1.0] * 6, "a": [1.0] * 6, "b": [1.0, 0.0] * 3}, sizes)
    second = run({"full": [1.0] * 6, "a": [1.0] * 6, "b": [1.0] * 6, "c": [1.0] * 6}, sizes, run_id="m-docqa-1", task="docqa")
    (found,) = findings(first + second).frontier["joint"]
    assert (found["over"], found["model"], found["members"]) == ("tasks", "smollm2", ["needle", "docqa"])
    assert [(p["stack"], p["score"], p["worst"], p["on_frontier"]) for p in found["points"]] == [
        ("b", 0.75, 0.5, True),
        ("a", 1.0, 1.0, True),
        ("full", 1.0, 1.0, False),
    ]


def test_families_are_what_a_stack_does() -> None:
    assert family_of({"keep": None, "keys": EXACT, "values": EXACT}) == "full"
    assert family_of({"keep": {}, "keys": EXACT, "values": EXACT}) == "eviction"
    assert family_of({"keep": {}, "keys": INT8, "values": EXACT}) == "eviction + quantization"
    assert family_of({"transform": {}, "keys": INT8}) == "transform + quantization"
    fewer = {"_target_": "harness.stages.codec.low_rank.LowRank", "inner": EXACT}
    assert family_of({"keys": fewer, "values": EXACT}) == "low rank"
    assert family_of({"keys": fewer, "values": fewer | {"inner": INT8}}) == "low rank + quantization"
    assert family_of({"keys": fewer, "values": INT8}) == "low rank + quantization"


@pytest.mark.parametrize("p", [0.5, 0.8, 0.9])
def test_intervals_of_a_share_cover_what_they_say(p: float) -> None:
    """Exactly, over all outcomes of 100 documents: between 93 and 97 %."""
    k = np.arange(101)
    chances = np.exp(
        [
            math.lgamma(101) - math.lgamma(i + 1) - math.lgamma(101 - i) + i * math.log(p) + (100 - i) * math.log(1 - p)
            for i in k
        ]
    )
    covered = sum(chance for i, chance in zip(k, chances, strict=True) if p in wilson(float(i), 100.0))
    assert 0.93 <= covered <= 0.97
