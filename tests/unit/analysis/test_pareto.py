"""The frontier: ties, duplicates, direction, groups, points that cannot be ranked, hypervolume by hand."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from harness.analysis.frontier import frontier, hypervolume, non_dominated, rank
from harness.analysis.points import points
from tests.support.record_factory import make, perplexity, sweep


def test_ties_and_duplicates_stay() -> None:
    cost, score = np.array([100, 100, 50, 50, 200.0]), np.array([0.9, 0.8, 0.9, 0.9, 0.95])
    assert non_dominated(cost, score, higher_is_better=True).tolist() == [False, False, True, True, True]


def test_the_order_of_points_does_not_matter() -> None:
    table = [(100, 0.9), (100, 0.8), (50, 0.9), (50, 0.9), (200, 0.95)]
    for order in itertools.permutations(table):
        mask = non_dominated(np.array([c for c, _ in order], float), np.array([s for _, s in order]), higher_is_better=True)
        assert sorted(p for p, on in zip(order, mask, strict=True) if on) == [(50, 0.9), (50, 0.9), (200, 0.95)]


def test_perplexity_is_lower_is_better() -> None:
    mask = non_dominated(np.array([1.0, 2, 3]), np.array([30.0, 15, 20]), higher_is_better=False)
    assert mask.tolist() == [True, True, False]


def test_frontier_agrees_with_the_definition_on_random_points() -> None:
    rng = np.random.default_rng(0)
    cost, score = rng.integers(1, 9, 60).astype(float), rng.integers(0, 9, 60).astype(float)
    for i, on in enumerate(non_dominated(cost, score, higher_is_better=True)):
        beaten = any(
            cost[j] <= cost[i] and score[j] >= score[i] and (cost[j] < cost[i] or score[j] > score[i]) for j in range(60)
        )
        assert on == (not beaten)


def test_hypervolume_by_hand() -> None:
    # steps 0..1 at 0.9, 1..3 at 0.5
    assert hypervolume(np.array([3.0, 1, 2, 0]), np.array([0.5, 0.9, 0.2, 1.0])) == pytest.approx(0.9 + 2 * 0.5)
    assert hypervolume(np.array([-1.0, 2]), np.array([1.0, -0.5])) == 0.0
    assert hypervolume(np.array([]), np.array([])) == 0.0


def group(stack: str, kv: int, scores, **more):
    return [
        make(stack=stack, example_id=f"e{i}", score=s, kv_bytes_context=kv, kv_bytes_full=1024, **more)
        for i, s in enumerate(scores)
    ]


def test_frontier_json_names_axis_and_direction_and_is_strict() -> None:
    records = group("full", 1024, [1, 1, 1, 1]) + group("a", 512, [1, 1, 1, 0]) + group("b", 256, [1, 1, 0, 0])
    records += group("worse", 600, [1, 0, 0, 0]) + group("odd", 100, ["Infinity"] * 4)
    content = json.loads(json.dumps(frontier(rank(points(records))), allow_nan=False))
    assert content["x"]["name"] == "bytes_context"
    assert content["x"]["direction"] == "lower is better"
    (only,) = content["groups"]
    assert only["y"] == {"name": "contains", "aggregate": "mean", "direction": "higher is better"}
    assert [entry["label"] for entry in only["frontier"]] == ["b", "a", "full"]
    assert only["left_out"] == [{"stack": "odd", "label": "odd", "reason": "score is not finite", "score": "Infinity"}]
    # log2 savings 0, 1, 2 at qualities 1, 0.75, 0.5; "worse" adds nothing
    assert only["hypervolume"] == pytest.approx(0.75 + 0.5)


def test_groups_are_never_mixed() -> None:
    aware = group("full", 1024, [1, 1], query_aware=True, run_id="q") + group("a", 10, [1, 1], query_aware=True, run_id="q")
    agnostic = group("full", 1024, [1, 1]) + group("a", 10, [0, 0])
    other = group("full", 1024, [1, 1], run_id="third")
    ranked = rank(points(aware + agnostic + other))
    assert ranked.groupby("run_id")["on_frontier"].sum().to_dict() == {"q": 1, "smollm2-needle-0a1b2c3d": 2, "third": 1}
    assert len(frontier(ranked)["groups"]) == 3


def test_points_that_cannot_be_ranked_say_why() -> None:
    records = group("full", 1024, [1, 1, 1, 1]) + group("short", 100, [1, 1])
    records += group("idle", 50, [1] * 4, status="not_exercised")
    records += group("bad", 10, [None] * 4, status="refused", error="budget too small")
    records += [r | {"kv_bytes_context": None} for r in group("lost", 1, [1] * 4)]
    ranked = rank(points(records)).set_index("stack")
    assert ranked["left_out"].fillna("").to_dict() == {
        "full": "",
        "short": "scored on 2 of 4 examples",
        "idle": "nothing was compressed",
        "bad": "no score: 4 refused",
        "lost": "bytes are not finite",
    }
    assert ranked["on_frontier"].to_dict() == {"full": True, "short": False, "idle": False, "bad": False, "lost": False}


def test_no_hypervolume_without_a_base_above_chance() -> None:
    for records in (group("a", 10, [1, 1]), group("full", 1024, [0, 0]) + group("a", 10, [0, 0])):
        (entry,) = frontier(rank(points(records)))["groups"]
        assert entry["hypervolume"] is None
        assert entry["hypervolume_missing"]


def test_perplexity_group() -> None:
    records = perplexity("full", [2.0, 2.2]) + perplexity("int8", [2.0, 2.2], kv_bytes_context=100)
    (entry,) = frontier(rank(points(records + perplexity("broken", [800.0, 900.0], kv_bytes_context=10))))["groups"]
    assert entry["y"]["direction"] == "lower is better"
    assert [e["label"] for e in entry["frontier"]] == ["int8"]
    assert entry["left_out"][0]["score"] == "Infinity"
    assert math.isfinite(entry["hypervolume"])


def test_a_sweep_has_a_frontier_that_rises_with_bytes() -> None:
    for entry in frontier(rank(points(sweep() + sweep(query_aware=True))))["groups"]:
        sizes, scores = [e["bytes_context"] for e in entry["frontier"]], [e["score"] for e in entry["frontier"]]
        assert len(sizes) >= 3
        assert sizes == sorted(sizes)
        assert scores == sorted(scores)
