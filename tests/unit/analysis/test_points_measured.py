"""What a point needs to be ranked: bytes above zero, and the chance score of all of its examples, not of one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.analysis.frontier import frontier, rank
from harness.analysis.points import cells, points
from harness.pages import table
from tests.support.record_factory import make, perplexity


def point(stack: str, kv, scores, **more):
    return [
        make(stack=stack, example_id=f"e{i}", group_id=f"g{i}", score=s, kv_bytes_context=kv, kv_bytes_full=1024, **more)
        for i, s in enumerate(scores)
    ]


@pytest.mark.parametrize("nbytes", [0, -100])
def test_a_point_without_bytes_above_zero_is_listed_and_never_on_the_front(nbytes: int) -> None:
    """The kind: a value that no cache can have counts as the best of all."""
    records = point("full", 1024, [1, 1, 1, 1]) + point("free", nbytes, [1] * 4) + point("half", 512, [1, 1, 1, 0])
    ranked = rank(points(records)).set_index("stack")
    assert ranked["left_out"]["free"] == "bytes of 4 of 4 examples are missing or not above zero"
    assert ranked["on_frontier"].to_dict() == {"full": True, "free": False, "half": True}
    (group,) = frontier(ranked.reset_index())["groups"]
    assert [entry["label"] for entry in group["left_out"]] == ["free"]
    assert group["hypervolume"] == pytest.approx(0.75)
    assert "not ranked: bytes of 4 of 4 examples" in table.text(ranked.reset_index())


@pytest.mark.parametrize("change", [{"kv_bytes_context": -100}, {"kv_bytes_context": None}, {"kv_bytes_full": 0}])
def test_one_example_without_bytes_is_enough(change) -> None:
    records = point("full", 1024, [1] * 4) + point("odd", 512, [1] * 4)
    records[-1] |= change
    ranked = rank(points(records)).set_index("stack")
    assert ranked["left_out"]["odd"] == "bytes of 1 of 4 examples are missing or not above zero"
    assert not ranked["on_frontier"]["odd"]


def test_chance_is_the_mean_over_examples_of_one_in_their_choices() -> None:
    """The kind: a property that differs by example, read off one record of a row."""
    records = point("full", 1024, [1, 1, 1]) + point("small", 256, [1, 0, 1])
    for record in records:
        record["chance"] = {"e0": 1 / 2, "e1": 1 / 2, "e2": 1 / 5}[record["example_id"]]
    ranked = rank(points(records))
    assert ranked["chance"].tolist() == pytest.approx([0.4, 0.4])
    (group,) = frontier(ranked)["groups"]
    assert group["chance"] == pytest.approx(0.4)
    assert group["hypervolume"] == pytest.approx(2 * (2 / 3 - 0.4) / 0.6)
    placed = cells(records)  # a map's cell reads the same chance
    assert placed["discriminative"].tolist() == points(records)["discriminative"].tolist()


def test_examples_without_an_answer_do_not_say_what_a_guess_would_score() -> None:
    records = point("full", 1024, [1, 1, 1], chance=0.5)
    records[-1] |= {"chance": 0.0, "status": "failed", "score": None}
    assert points(records)["chance"].tolist() == [0.5]


def test_chance_of_perplexities_is_aggregated_as_they_are() -> None:
    records = perplexity("full", [2.0, 3.0])
    for record, guess in zip(records, (100.0, 1000.0), strict=True):
        record["chance"] = guess
    weights = np.array([record["weight"] for record in records])
    wanted = math.exp(float(np.sum(weights * np.log([100.0, 1000.0])) / weights.sum()))
    assert points(records)["chance"].iloc[0] == pytest.approx(wanted)
    assert points(perplexity("full", [2.0, 3.0]))["chance"].iloc[0] == 49152.0


def test_a_chance_that_is_not_known_gives_no_hypervolume_and_no_warning() -> None:
    ranked = rank(points(point("full", 1024, [1] * 6, chance=None) + point("half", 512, [1] * 6, chance=None)))
    (group,) = frontier(ranked)["groups"]
    assert (group["chance"], group["hypervolume"], group["discriminative"]) == (None, None, None)
    assert ranked["discriminative"].isna().all()
