"""A page of as many points as a large sweep has stays small: what it says twice it holds once."""

from __future__ import annotations

import json
import re
from pathlib import Path

from plotly.offline import get_plotlyjs

from harness.analysis.findings import findings
from harness.pages import dashboard
from tests.support import record_factory as factory
from tests.support.browser import content

STACKS, BUDGETS = 30, 20
MOST = 1000  # bytes that a point adds to a page: 3,000 points and Plotly itself stay below 8 MB


def page_of(path: Path, stacks: int) -> Path:
    made = [factory.answer(example, "full", None) for example in factory.grid(depths=2, repeats=1)]
    for stack in range(stacks):
        for step in range(BUDGETS):
            for example in factory.grid(depths=2, repeats=1):
                one = factory.answer(example, "h2o", round(0.02 + 0.04 * step, 2))
                made.append(one | {"stack": f"scorer{stack}_int4", "key": factory.sha(stack, one["key"])})
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
