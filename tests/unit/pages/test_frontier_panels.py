"""The figure of a frontier has axes for the panels that there are, and no others."""

from __future__ import annotations

import re

import pytest

from harness.analysis.findings import findings
from harness.analysis.point_row import BASE
from harness.pages.dashboard import drawable
from harness.pages.frontier_figure import frontier
from harness.pages.looks import looks
from tests.support.record_factory import ROW, make


@pytest.mark.parametrize("panels", [1, 2, 3, 4])
def test_an_odd_number_of_panels_leaves_no_empty_axes(panels: int) -> None:
    records = [
        make(run_id=f"r{i}", example_id=f"e{j}", group_id=f"g{j}", stack=stack, kv_bytes_context=size)
        for i in range(panels)
        for stack, size in (("full", 1000 * ROW), ("int8", 500 * ROW))
        for j in range(4)
    ]
    section = drawable(findings(records).points)
    layout = frontier(section, looks(section["stack"], BASE)).to_plotly_json()["layout"]
    assert sum(bool(re.fullmatch(r"xaxis\d*", key)) for key in layout) == panels
    assert len(layout["annotations"]) == panels
