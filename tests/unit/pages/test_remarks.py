"""What is said of a point beside its score: peaks, remarks and numbers of documents, in one way everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.analysis.contrast import contrasts
from harness.analysis.findings import findings
from harness.analysis.frontier import rank
from harness.analysis.points import points, rows_of
from harness.pages import hover, table
from harness.pages.headline import said
from harness.pages.units import Difference
from harness.pages.words.remarks import about_many, largest_peak, peaks_at, remarks, remarks_of
from tests.support.record_factory import ROW, make, perplexity, split


def run(stack: str, scores: list[float], share: float, **more: Any) -> list[dict[str, Any]]:
    size = int(ROW * 1000 * share)
    return [
        make(stack=stack, example_id=f"e{i}", group_id=f"g{i}", score=score, kv_bytes_context=size, **more)
        for i, score in enumerate(scores)
    ]


@pytest.mark.parametrize("ratios", [(math.nan, 1.4), (1.4, math.nan), (1.4, 0.2)])
def test_a_peak_that_is_not_known_hides_no_other(ratios: tuple[float, float]) -> None:
    rows = [{"peak_ratio": ratio} for ratio in ratios]
    assert largest_peak(rows) == 1.4 and peaks_at(rows) == "peaks at 140 % of the full cache's peak"
    assert peaks_at([{}]) == peaks_at([{"peak_ratio": 1.0}]) == "" and math.isnan(largest_peak([{}]))


def test_documents_are_counted_in_whole_numbers() -> None:
    assert about_many({"settled_by": 1234.0}) == "about 1,234" and about_many({"settled_by": math.nan}) == ""
    records = run("full", [1.0] * 15, 1) + run("int4", [1.0] * 15, 0.3)
    row = rows_of(findings(records).points.assign(settled_by=150.0))[1]
    assert "open verdict settled by about 150 documents" in hover.about(row)


def test_a_difference_without_an_interval_has_no_bracket() -> None:
    assert Difference(0.12, math.nan, math.nan, in_nats=True).text == "+0.12"
    assert Difference(0.12, 0.01, 0.23, in_nats=True).text == "+0.12 [+0.010, +0.23]"


def test_a_headline_names_the_point_that_it_is_about_and_no_word_of_itself() -> None:
    """A stack called as a word of the sentence is not what it is about."""
    records = run("full", [1.0] * 15, 1) + run("loss", [0.0] * 15, 0.1) + run("a", [1.0] * 15, 0.3)
    found = said(rank(points(records)))
    assert "no loss seen" in found.text and found.label == "a"
    assert said(rank(points(run("full", [1.0] * 9, 1)))).label is None


def with_tail(stack: str) -> list[dict[str, Any]]:
    return run(stack, [1.0] * 15, 0.5, bytes=split({"payload": ROW * 250, "tail": ROW * 250}))


def test_a_remark_is_no_problem_and_one_line_of_a_table() -> None:
    full = run("full", [1.0] * 15, 1)
    ranked = findings([*full, *(record for i in range(12) for record in with_tail(f"kivi{i}"))]).points
    row = next(row for row in rows_of(ranked) if row["stack"] == "kivi0")
    assert "exact tail: 50 % of its bytes" in remarks(row)[0]
    status = hover.about(row)
    assert "all examples ok" in status and "exact tail: 50 %" in status
    ((kind, named),) = remarks_of(ranked)
    assert len(named) == 12 and table.text(ranked, 400).count(kind) == 1
    assert "and 4 more" in next(line for line in table.text(ranked, 400).splitlines() if kind in line)


def test_a_contrast_says_its_unit_in_the_head_alone(capsys: pytest.CaptureFixture[str]) -> None:
    nll = [2.0 + 0.1 * i for i in range(12)]
    records = perplexity("full", nll) + perplexity("int8", nll, kv_bytes_context=ROW)
    records += perplexity("int4", [one + 0.01 for one in nll], kv_bytes_context=ROW // 2)
    table.show_contrasts(contrasts(records, ["int4"]).frame)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("int8")]
    assert rows and not any(" nats" in line for line in rows)
