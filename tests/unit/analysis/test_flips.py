"""Answers that changed against the full cache: which, how many, and no more of them than a page can hold."""

from __future__ import annotations

from typing import Any

from harness.analysis.contrast import flips
from harness.analysis.points import points
from tests.support.record_factory import make, perplexity


def _run(stack: str, scores: list[float | None], **more: Any) -> list[dict[str, Any]]:
    answers = [f"{stack} said {i}" for i in range(len(scores))]
    return [
        make(stack=stack, example_id=f"e{i}", score=score, output=answer, **more)
        for i, (score, answer) in enumerate(zip(scores, answers, strict=True))
    ]


def test_losses_come_first_and_unchanged_scores_are_no_flips() -> None:
    full = _run("full", [1, 1, 0.5, 0, 1], question="why?")
    records = full + _run("int4", [1, 0, 0, 1, None], question="why?")
    none, found = flips(records)
    assert (none.lost, none.won, none.shown) == (0, 0, [])
    assert (found.lost, found.won) == (2, 1)
    assert [(one.example, one.full_score, one.score) for one in found.shown] == [("e1", 1, 0), ("e2", 0.5, 0), ("e3", 0, 1)]
    first = found.shown[0]
    assert (first.question, first.gold, first.full, first.answer) == ("why?", "4271893", "full said 1", "int4 said 1")


def test_each_point_in_the_order_of_the_points_table_against_its_own_run() -> None:
    one = _run("full", [1, 1]) + _run("int4", [0, 1])
    two = _run("full", [0, 0], run_id="other") + _run("int4", [0, 1], run_id="other")
    assert points(one + two)["run_id"].tolist()[2:] == ["other"] * 2
    assert [(found.lost, found.won) for found in flips(one + two)] == [(0, 0), (1, 0), (0, 0), (0, 1)]


def test_what_is_shown_is_bounded_in_number_and_length() -> None:
    full, lost = _run("full", [1] * 40), _run("int4", [0] * 40)
    found = flips(full + [record | {"output": "x" * 10_000} for record in lost])[1]
    assert (found.lost, len(found.shown)) == (40, 6)
    assert len(found.shown[0].answer) == 160 and found.shown[0].answer.endswith(" …")
    many = full[:3] + [one for i in range(2100) for one in _run(f"s{i}", [0, 0, 0])]
    assert sum(len(one.shown) for one in flips(many)) <= 4000


def test_a_stream_and_an_older_record_have_nothing_to_show() -> None:
    streamed = [record | {"output": None} for record in perplexity("full", [2.0, 2.0]) + perplexity("int4", [2.5, 2.5])]
    assert flips(streamed)[1].shown == []
    older = [{k: v for k, v in record.items() if k != "question"} for record in _run("full", [1]) + _run("int4", [0])]
    assert flips(older)[1].shown[0].question == ""
