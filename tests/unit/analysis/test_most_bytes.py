"""The most bytes at any time beside the full cache's own most: whether a point fits where the full cache does."""

from __future__ import annotations

import math

from harness.analysis.findings import findings
from harness.pages import table
from tests.support.record_factory import make


def _run(stack: str, peaks: tuple[int, int | None], **more: object) -> list[dict[str, object]]:
    prefill = {"kv_bytes_peak": peaks[0], "kv_bytes_peak_prefill": peaks[1]}
    return [make(stack=stack, example_id=f"e{i}", group_id=f"g{i}", **prefill, **more) for i in range(6)]


def test_the_larger_peak_counts_on_both_sides() -> None:
    """The full cache's most is at the end of its answer, a compressed one's while both copies are there."""
    records = _run("full", (1100, 1000)) + _run("int4", (500, 1430)) + _run("chunked", (600, 700))
    points = findings(records).points.set_index("label")
    assert points["bytes_peak_most"].to_dict() == {"full": 1100, "int4": 1430, "chunked": 700}
    assert points.loc["int4", "peak_ratio"] == 1.3 and points.loc["chunked", "peak_ratio"] < 1
    shown = " ".join(table.text(findings(records).points).split())
    assert "Peak: 1 of 2 points hold more than the full cache ever does" in shown and "int4 130 %" in shown


def test_what_is_not_known_is_not_claimed() -> None:
    points = findings(_run("full", (1100, 1000)) + _run("old", (500, None)) + _run("alone", (500, 2000), run_id="other")).points
    ratio = points.set_index("label")["peak_ratio"]
    assert math.isnan(ratio["old"]) and math.isnan(ratio["alone"])
    assert "Peak:" not in table.text(points)
