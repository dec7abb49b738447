"""A page of as many points as a large sweep has stays small: what it says twice it holds once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from harness.analysis.findings import findings
from harness.pages import dashboard
from tests.support import record_factory as factory
from tests.support.browser import content
from tests.support.driver import opened, value

STACKS, BUDGETS = 30, 20
MOST = 1000  # bytes that a point adds to a page: 3,000 points and Plotly itself stay below 8 MB


def page_of(path: Path, stacks: int) -> Path:
    made = [factory.answer(example, "full", None) for example in factory.grid(depths=2, repeats=1)]
    for stack in range(stacks):
        for step in range(BUDGETS):
            for example in factory.grid(depths=2, repeats=1):
                one = factory.answer(example, "h2o", round(0.02 + 0.04 * step, 2))
                own = factory.sha(stack, one["key"])
                answer = {} if one["score"] else {"output": own * 5, "question": f"What is said in {one['example_id']}?"}
                made.append(one | {"stack": f"scorer{stack}_int4", "key": own} | answer)
    dashboard.write(findings(made), path)
    return path


def test_a_point_adds_little_to_a_page_and_nothing_stands_in_it_twice(tmp_path: Path) -> None:
    few, many = page_of(tmp_path / "few.html", 3), page_of(tmp_path / "many.html", STACKS)
    added = (many.stat().st_size - few.stat().st_size) / ((STACKS - 3) * BUDGETS)
    assert added <= MOST
    assert len(get_plotlyjs()) + 3000 * added < 8e6
    raw = json.loads(re.search(r'id="content" type="application/json">(.*?)</script>', many.read_text(), re.DOTALL)[1])
    for name in ("parts", "lines", "texts", "cells", "lists"):
        assert len({json.dumps(one) for one in raw[name]}) == len(raw[name])
    assert len(content(many)["tables"]["s0-points0"]) == STACKS * BUDGETS + 1


@pytest.mark.browser
@pytest.mark.slow
def test_three_thousand_points_are_searched_filtered_and_opened(tmp_path: Path) -> None:
    page = page_of(tmp_path / "page.html", 150)
    assert page.stat().st_size < 8e6
    with opened(page, tmp_path) as driver:
        assert value(driver, "document.querySelectorAll('#s0-points0 tbody tr').length") == 3001
        label = "scorer149_int4 0.78"
        driver.find_element("css selector", "[data-search=s0-points0]").send_keys(label)
        (row,) = [one for one in driver.find_elements("css selector", "#s0-points0 tbody tr:not([hidden])")]
        row.click()
        assert driver.find_element("css selector", "#detail h2").text == label
        assert driver.find_element("css selector", "#detail .command").text.endswith("compress.keep.budget.value=0.78")
        value(driver, "(wanted.budget = String(store.facets.budget.names.indexOf('fraction 0.78')), applyFilters())")
        points = "document.getElementById('s0-frontier').data.filter(t => t.mode !== 'lines' && !t.meta.base).flatMap(t => t.x).filter(x => x !== null)"
        drawn = value(driver, f"{points}.length")
        assert drawn == 150 == len(value(driver, "document.getElementById('s0-bytes0').data[0].y")) + 90
