"""Several results together: a point is one configuration, whatever each result calls it, and its row is of the run that was ranked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.analysis.findings import findings
from harness.pages.dashboard import write
from harness.pages.words import together
from tests.support.record_factory import make

SIZES = {"full": 100, "one": 50, "other": 40}
ONE_NAME = {"full": "full", "one": "int4", "other": "int4"}


def run(task: str, scores: dict[str, float], *, aware: bool = False, name: str = "") -> list[dict[str, Any]]:
    """Eight documents; each configuration is right on the first share of them."""
    return [
        make(
            run_id=f"m-{task}-{aware}{name}",
            task=task,
            query_aware=aware,
            example_id=f"d{i}",
            group_id=f"d{i}",
            stack=ONE_NAME[arm],
            stack_config={"of": arm},
            score=float(i < share * 8),
            kv_bytes_context=SIZES[arm],
            kv_bytes_full=SIZES["full"],
        )
        for arm, share in scores.items()
        for i in range(8)
    ]


def both_modes() -> list[dict[str, Any]]:
    """Two configurations of one name where the question is unseen, one of them where it is seen; there it is on the frontier."""
    unseen, seen = {"full": 1, "one": 0.5, "other": 0.25}, {"full": 1, "other": 0.75}
    runs = [run(task, scores, aware=aware) for task in ("a", "b") for aware, scores in ((False, unseen), (True, seen))]
    return [record for records in runs for record in records]


def of(row: Any) -> str:
    return str(json.loads(row["stack_config"])["of"])


def test_the_mark_of_a_frontier_stands_at_the_configuration_that_is_on_it() -> None:
    found = findings(both_modes())
    (one,) = together.together(found.points, found.frontier["joint"])
    heads = [head for _, head in together.columns(one)]
    seen = heads.index("frontier, question seen")
    marks = {of(next(iter(arm.values()))): cells[seen].text for arm, cells in zip(one.arms, together.cells(one), strict=True)}
    assert marks == {"full": "●", "one": "", "other": "●"}


def test_a_point_of_the_figure_opens_itself(tmp_path: Path) -> None:
    records = both_modes()
    found = findings(records)
    write(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    held = re.search(r'<script id="content" type="application/json">(.*?)</script>', text)
    assert held is not None
    figures, rows = json.loads(held[1])["figures"], found.points.to_dict("records")
    modes = [bool(entry["query_aware"]) for entry in found.frontier["joint"]]
    sets = [
        {of(rows[i]) for points in trace["meta"]["sets"] for i in points}
        for trace in figures[f"j0-mean{modes.index(True)}"]["data"]
        if trace["name"] == "int4"
    ]
    assert sets == [{"other"}]


def test_names_with_marks_of_html_stand_together(tmp_path: Path) -> None:
    scores = {"full": 1, "one": 0.5}
    write(findings([*run("a<b>", scores), *run("'b'", scores)]), tmp_path / "page.html")
    assert "a&lt;b&gt;, question unseen" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_rows_are_of_the_run_that_was_ranked() -> None:
    """A second run whose full cache is at chance is ranked nowhere: it must not take the place of the first."""
    scores = {"full": 1, "one": 0.5}
    late = run("a", {"full": 0, "one": 0}, name="-later")
    found = findings([*run("a", scores), *run("b", scores), *late])
    (entry,) = found.frontier["joint"]
    assert {name: one["run_id"] for name, one in entry["runs"].items()} == {"a": "m-a-False", "b": "m-b-False"}
    (one,) = together.together(found.points, [entry])
    assert {row["run_id"] for arm in one.arms for row in arm.values()} == {"m-a-False", "m-b-False"}
    assert all(row["score"] > 0 for arm in one.arms for row in arm.values())
