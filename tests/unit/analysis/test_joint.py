"""Several tasks of one model together: questions in shares of answers, streams in nats, and nothing averaged over both."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.findings import findings
from harness.analysis.joint import NATS, unbeaten
from harness.pages.outputs import merge
from harness.pages.words import together
from tests.support.record_factory import make, write_shard

SIZES = {"full": 100, "a": 50, "b": 40, "c": 30}
DOCUMENTS = 8


def needle(scores: dict[str, float], *, aware: bool = False) -> list[dict[str, Any]]:
    """Each stack right on the first share of the documents."""
    return [
        _record(stack, i, run_id=f"m-needle-{aware}", score=float(i < share * DOCUMENTS), query_aware=aware)
        for stack, share in scores.items()
        for i in range(DOCUMENTS)
    ]


def stream(losses: dict[str, float]) -> list[dict[str, Any]]:
    """Each stack loses that many nats a token, half of the documents a little more, half as much less."""
    more = {"task": "stream", "metric": "perplexity", "aggregate": "exp_weighted", "higher_is_better": False, "chunk": 32}
    return [
        _record(
            stack,
            i,
            run_id="m-stream-0",
            score=2.7 + 0.1 * i + loss + (0.001 * (-1) ** i if loss else 0.0),
            weight=100.0,
            chance=49152.0,
            **more,
        )
        for stack, loss in losses.items()
        for i in range(DOCUMENTS)
    ]


def _record(stack: str, i: int, **more: Any) -> dict[str, Any]:
    size = {"kv_bytes_context": SIZES[stack], "kv_bytes_full": SIZES["full"]}
    return make(example_id=f"d{i}", group_id=f"d{i}", stack=stack, stack_config={"of": stack}, **size, **more)


def joint(*runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = findings([record for run in runs for record in run]).frontier["joint"]
    return found


def front(entry: dict[str, Any]) -> dict[str, bool]:
    return {point["stack"]: point["on_frontier"] for point in entry["points"]}


def test_a_point_must_be_beaten_on_every_task_to_leave_the_frontier() -> None:
    """a is best on streams, b on needles, c is the smallest; where b does better than a on both with fewer bytes, a goes."""
    (entry,) = joint(needle({"full": 1, "a": 0.5, "b": 0.75, "c": 0.5}), stream({"full": 0, "a": 0.01, "b": 0.2, "c": 0.3}))
    assert front(entry) == {"full": True, "a": True, "b": True, "c": True}
    (entry,) = joint(needle({"full": 1, "a": 0.5, "b": 0.75}), stream({"full": 0, "a": 0.3, "b": 0.2}))
    assert front(entry) == {"full": True, "a": False, "b": True}
    assert entry["units"] == {"needle": "contains", "stream": NATS} and entry["better"] == {
        "needle": "higher",
        "stream": "lower",
    }


def test_every_task_keeps_its_own_unit() -> None:
    (entry,) = joint(needle({"full": 1, "a": 0.5}), stream({"full": 0, "a": 0.1}))
    point = next(point for point in entry["points"] if point["stack"] == "a")
    assert point["score"] is None and point["worst"] is None and point["ratio"] == 0.5
    assert point["against_full"]["needle"]["difference"] == -0.5
    assert point["against_full"]["stream"]["difference"] == pytest.approx(0.1)
    assert point["against_full"]["stream"]["low"] > 0 > point["against_full"]["needle"]["high"]


def test_a_stream_stands_beside_questions_of_both_modes() -> None:
    """It asks none, so its mode says nothing; the two modes of a question are never joined."""
    entries = joint(needle({"full": 1, "a": 0.5}), needle({"full": 1, "a": 1}, aware=True), stream({"full": 0, "a": 0.1}))
    assert [(entry["query_aware"], entry["members"]) for entry in entries] == [
        (aware, ["needle", "stream"]) for aware in (False, True)
    ]
    assert [entry["points"][0]["against_full"]["needle"]["difference"] for entry in entries] == [-0.5, 0.0]
    assert joint(needle({"full": 1, "a": 0.5}), needle({"full": 1, "a": 1}, aware=True)) == []


def test_only_what_every_task_ranked_has_a_place() -> None:
    (entry,) = joint(needle({"full": 1, "a": 1, "b": 1}), stream({"full": 0, "a": 0.1}))
    assert front(entry) == {"full": True, "a": True}
    assert joint(needle({"full": 0, "a": 0}), stream({"full": 0, "a": 0.1})) == []  # the full cache at chance


def side_by_side(*runs: list[dict[str, Any]]) -> together.Together:
    found = findings([record for run in runs for record in run])
    (one,) = together.together(found.points, found.frontier["joint"])
    return one


def test_the_headline_names_the_smallest_that_lost_nowhere_each_with_its_own_bytes() -> None:
    scores, losses = {"full": 1, "a": 1, "b": 1, "c": 0.25}, {"full": 0, "a": 0.0001, "b": 0.4, "c": 0.0001}
    said = together.headline(side_by_side(needle(scores), stream(losses)))
    assert said.startswith(
        "a is the smallest that is worse on none of them: needle (unseen) 50 % of the bytes, no loss seen (≤ 0.32); "
        "stream 50 % of the bytes, equal within ±0.0"
    )
    assert said.endswith(" nats. Documents that would settle what is open: needle (unseen) about 22")
    nowhere = side_by_side(needle({"full": 1, "c": 0.25}), stream({"full": 0, "c": 0.0}))
    assert together.headline(nowhere) == "Every smaller cache does worse, or may, on at least one of them"


def test_both_modes_and_a_stream_are_one_table_that_says_the_stream_is_one_run() -> None:
    runs = needle({"full": 1, "a": 1}), needle({"full": 1, "a": 0.5}, aware=True), stream({"full": 0, "a": 0.1})
    found = side_by_side(*runs)
    assert [panel.mode for panel in found.panels] == [
        "needle, question unseen",
        "needle, question seen",
        "stream, no question asked, one run",
    ]
    (own,) = [cells for cells in together.cells(found) if cells[0].text == "a"]
    heads = [f"{of}: {head}" for of, head in together.columns(found)]
    verdicts = [cell.text for cell, head in zip(own, heads, strict=True) if head.endswith(": verdict")]
    assert verdicts == ["no loss seen (≤ 0.32)", "worse ‡", "worse"]
    assert heads[-2:] == [": frontier, question unseen", ": frontier, question seen"]


def test_the_terminal_and_the_page_show_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = needle({"full": 1, "a": 0.5}), stream({"full": 0, "a": 0.1})
    found = side_by_side(*runs)
    for run in runs:
        write_shard(tmp_path / str(run[0]["run_id"]), run)
    merge([tmp_path / str(run[0]["run_id"]) for run in runs], tmp_path / "page.html", [])
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text(encoding="utf-8")
    words = " ".join(printed.split())  # a title wider than its table is folded
    assert found.title in words and together.headline(found) in words
    for cells, row in zip(together.cells(found), together.printed(found), strict=True):
        assert all(text in printed for text in row.values())
        assert all(json.dumps(cell.text)[1:-1] in page for cell in cells)
    assert all(f'data-of="{of}"' in page for of, _ in together.columns(found) if of)


def test_unbeaten_is_pareto_dominance() -> None:
    """Beside the definition, point by point, with ties."""
    rng = np.random.default_rng(0)
    cost, gains = rng.integers(0, 5, 40).astype(float), rng.integers(0, 4, (40, 3)).astype(float)
    beaten = {
        i
        for i, j in itertools.permutations(range(40), 2)
        if cost[j] <= cost[i] and all(gains[j] >= gains[i]) and (cost[j] < cost[i] or any(gains[j] > gains[i]))
    }
    assert set(np.flatnonzero(~unbeaten(cost, gains)).tolist()) == beaten
