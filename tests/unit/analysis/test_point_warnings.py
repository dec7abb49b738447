"""What points warn of: budgets that were not those asked for, streams that read an exact cache, empty answers, cut prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.findings import findings
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.pages import dashboard, table
from tests.support.record_factory import grid, make


def _points(changes: list[dict[str, Any]], stack: str = "h2o") -> pd.DataFrame:
    records = [make(**e, stack=stack) | change for e, change in zip(grid(), changes, strict=False)]
    return points(records)


def test_empty_answers_are_counted_and_many_are_a_warning(tmp_path: Path) -> None:
    """The kind: an answer without text passes as one that was wrong."""
    changes = [{"output": text, "score": 0.0} for text in ("", "  \n", "no", "x")] + [{}] * 16
    few = _points(changes)
    assert few["n_empty"].tolist() == [2] and few["warnings"].isna().all()
    many = _points(changes[:4] + [{}] * 4)
    assert many["warnings"].tolist() == ["empty answers: 2 of 8 answers"]
    assert _points([{"output": None}] * 4)["n_empty"].tolist() == [0], "a stream has no answers"
    assert _points([{"output": "", "status": "failed", "score": None}] * 4)["n_empty"].tolist() == [0]
    shown = " ".join(table.text(rank(many)).split())
    assert "h2o: 2 empty answers" in shown and "h2o: warning: empty answers: 2 of 8 answers" in shown
    page = tmp_path / "page.html"
    dashboard.write(findings([make(**e, stack="h2o") | c for e, c in zip(grid(), changes[:8], strict=False)]), page)
    assert "2 empty answers; warning: empty answers: 2 of 8 answers" in page.read_text(encoding="utf-8")


def test_the_full_cache_counts_its_empty_answers_too() -> None:
    assert _points([{"output": "", "score": 0.0}] * 4, "full")["warnings"].tolist() == ["empty answers: 4 of 4 answers"]


def test_a_layer_budget_other_than_asked_is_named() -> None:
    told = {"layer_budget": "uniform (asked: pyramid)"}
    assert _points([told] * 4)["warnings"].tolist() == ["layer budget: uniform (asked: pyramid)"]
    assert _points([told, {}, {}, {"layer_budget": "pyramid"}])["warnings"].tolist() == [
        "layer budget: uniform (asked: pyramid) in 1 of 4 examples"
    ]
    assert _points([{"layer_budget": "pyramid"}] * 4)["warnings"].isna().all()


def test_a_stream_that_mostly_read_an_exact_cache_is_named() -> None:
    stream = {"chunk": 32, "output": None}
    low = [stream | {"compressed_share": share, "weight": weight} for share, weight in ((0.1, 300.0), (0.9, 100.0))]
    assert _points(low)["warnings"].tolist() == ["few compressed reads: 30 % of the scored tokens read a compressed store"]
    assert _points([stream | {"compressed_share": 0.5}] * 2)["warnings"].isna().all()
    assert _points([stream | {"compressed_share": 0.0}] * 2, "full")["warnings"].isna().all()
    assert _points([{"compressed_share": 0.1}] * 2)["warnings"].isna().all(), "questions are asked after the compression"


def test_several_warnings_are_joined() -> None:
    changes = [{"truncated": True}, {"output": "", "score": 0.0}]
    assert _points(changes)["warnings"].tolist() == [
        "empty answers: 1 of 2 answers; truncated prompts: 1 of 2 prompts, left out of the score"
    ]
