"""A page of many points stays usable: no figure grows with them, and every point can be reached; maps say what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis.findings import findings
from harness.analysis.points import cells
from harness.pages import dashboard
from harness.pages.place_figures import heat
from tests.support.browser import ask, content
from tests.support.record_factory import ROW, grid, make

STACKS, BUDGETS = 45, 10


def _records() -> list[dict[str, Any]]:
    made = []
    for i in range(STACKS + 1):
        for budget in range(BUDGETS if i else 1):
            point = {"keep.budget.value": budget} if i else {}
            for j, example in enumerate(grid(repeats=1)):
                size = ROW * (20_000 if not i else 100 * (budget + 1) + i)
                score = float((i + budget + j) % 3 > 0)
                made.append(make(**example, stack=f"s{i}" if i else "full", point=point, score=score, kv_bytes_context=size))
    return made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "page.html"
    dashboard.write(findings(_records()), path)
    return path


def test_no_figure_grows_with_the_number_of_points(page: Path) -> None:
    """The kind: a figure with a row of pixels for every point."""
    found = content(page)
    assert {name: figure["layout"]["height"] <= 1500 for name, figure in found["figures"].items()} == dict.fromkeys(
        found["figures"], True
    )
    n = STACKS * BUDGETS + 1
    windows = found["windows"]["s0-bytes0"]
    assert sorted(i for first, last in windows for i in range(first, last)) == list(range(n))
    assert windows[0][1] == n, "opens with the fewest bytes"
    faint = [
        o for t in found["figures"]["s0-frontier"]["data"] if "opacity" in t.get("marker", {}) for o in t["marker"]["opacity"]
    ]
    assert len(faint) == n and set(faint) == {0.35, 1.0}


@pytest.mark.browser
def test_every_point_of_the_bytes_figure_and_of_the_maps_can_be_reached(page: Path, tmp_path: Path) -> None:
    seen = ask(
        page,
        """{ const pause = () => new Promise(done => setTimeout(done, 200));
        const plot = document.getElementById('s0-bytes0'), select = document.querySelector('[data-rows=s0-bytes0]');
        const out = {names: [], heights: []};
        for (let i = 0; i < select.options.length; i += 1) {
          select.selectedIndex = i; select.dispatchEvent(new Event('change')); await pause();
          out.names.push(...plot.data[0].y); out.heights.push(plot._fullLayout.height);
          const [low, high] = plot._fullLayout.yaxis.range; out.inside = low < 0 && high > plot.data[0].y.length - 1; }
        out.maps = document.querySelector('[data-plot=s0-heat0]').options.length;
        out.rows = document.querySelector('table').tBodies[0].rows.length;
        const verdict = document.querySelector('td[data-tip]'); out.tip = verdict.title; out.verdict = verdict.textContent;
        return out; }""",
        tmp_path,
    )
    n = STACKS * BUDGETS + 1
    assert len(set(seen["names"])) == len(seen["names"]) == seen["maps"] == seen["rows"] == n
    assert max(seen["heights"]) <= 1500 and seen["inside"]
    assert seen["tip"].startswith(f"{seen['verdict']}: ") and "Trust it?" in seen["tip"]


def test_a_page_changes_nothing_of_what_it_is_handed(tmp_path: Path) -> None:
    found = findings(_records()[:40])
    before = found.points.copy()
    dashboard.write(found, tmp_path / "one.html")
    pd.testing.assert_frame_equal(found.points, before)
    dashboard.write(found, tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


@pytest.mark.parametrize("task", ["needle", "docqa"])
def test_a_map_is_titled_by_its_own_task_and_metric(task: str, tmp_path: Path) -> None:
    records = [make(**e, stack=s, task=task, metric="f1") for e in grid(repeats=1) for s in ("full", "int8")]
    dashboard.write(findings(records), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<h3>{task}: f1 by length and depth, " in text
    assert "needle" not in text.split('<section id="s0">')[1].split("</section>")[0] or task == "needle"


def test_a_map_names_the_depth_at_which_the_answer_stood() -> None:
    records = [make(**e, stack=s) | {"depth_realised": e["depth"] * 0.9} for e in grid(repeats=2) for s in ("full", "int8")]
    figure, maps = heat(cells(records), "int8")
    assert list(figure.data[0].y) == ["0%", "22%", "45%", "68%", "90%"]
    assert "depth 45.0% (asked: 50%)" in maps["int8"]["customdata"][2][0]
    unknown, _ = heat(cells([record | {"depth_realised": None} for record in records]), "int8")
    assert list(unknown.data[0].y) == ["0%", "25%", "50%", "75%", "100%"]
    same, _ = heat(cells([record | {"depth_realised": 0.5} for record in records]), "int8")
    assert len(set(same.data[0].y)) == 5, "rows are never laid over each other"


def test_a_map_of_many_depths_keeps_its_height() -> None:
    records = [make(**e, stack=s) for e in grid(repeats=1, depths=60) for s in ("full", "int8")]
    figure, _ = heat(cells(records), "int8")
    assert figure.layout.height <= 800
    assert np.shape(figure.data[1].z) == (60, 2)
