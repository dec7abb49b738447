"""What a page says first of a panel: what was found, and nothing that was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.findings import findings
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.pages.headline import headline
from tests.support.record_factory import ROW, make, perplexity


def _run(stack: str, scores: list[float | None], share: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    size = int(ROW * 1000 * share)
    return [
        make(stack=stack, example_id=f"e{i}", group_id=f"g{i}", score=s, kv_bytes_context=size, **more)
        for i, s in enumerate(scores)
    ]


def _said(records: list[dict[str, Any]]) -> str:
    return headline(rank(points(records)))


def _failed(stack: str, n: int = 4) -> list[dict[str, Any]]:
    return _run(stack, [None] * n, status="failed", error="boom")


def test_a_run_of_failures_says_that_nothing_was_measured() -> None:
    """The kind: a verdict where there is no score."""
    assert _said(_failed("full") + _failed("int8")) == "Nothing was measured here: 8 failed"
    refused = _run("int8", [None] * 3, status="refused", error="no")
    assert _said(_failed("full", 3) + refused) == "Nothing was measured here: 3 failed, 3 refused"
    assert _said(_run("full", [1] * 9) + _failed("int8")) == "Nothing was measured beside the full cache: 4 failed"
    assert _said(_run("full", [1] * 9)) == "Only the full cache was measured"
    assert _said(_failed("full") + _run("int8", [1] * 4, 0.5)) == "No smaller cache could be compared with the full one"


def test_no_loss_in_few_prompts_gives_the_loss_that_can_be_excluded() -> None:
    scores = [1.0] * 12 + [0.0] * 3
    records = _run("full", scores) + _run("int8", scores, 0.52) + _run("int4", scores, 1 / 3)
    row = points(records).set_index("label").loc["int4"]
    assert row["vs_full"] == "not resolved"
    assert _said(records) == (
        f"int4, 33.3 % of the bytes: no loss seen in 15 prompts; a loss above {-row['diff_lo']:.2f} can be excluded"
    )


def test_a_loss_that_is_not_resolved_is_given_with_its_interval() -> None:
    records = _run("full", [1.0] * 10 + [0.0] * 5) + _run("int4", [1.0] * 9 + [0.0] * 6, 0.3)
    said = _said(records)
    assert said.startswith(
        "Not resolved whether a smaller cache equals the full one; the nearest is int4, 30 % of the bytes: -0.07 ["
    )
    assert said.endswith("in 15 prompts")


def test_equal_and_worse_caches() -> None:
    many = [1.0] * 90 + [0.0] * 10
    good = _said(_run("full", many) + _run("int8", many, 0.5))
    assert good.startswith("int8 equals the full cache within noise at 50 % of its bytes; a loss above 0.0")
    bad = _said(_run("full", many) + _run("int1", [0.0] * 100, 0.1))
    assert bad.startswith("Every smaller cache does worse than the full one; the nearest is int1, 10 % of the bytes: -0.90 [")
    assert (
        _said(_run("full", many) + _run("big", many, 1.5)) == "No cache that could be ranked here is smaller than the full one"
    )


def test_perplexity_names_its_unit() -> None:
    nll = [2.0 + 0.1 * i for i in range(12)]
    said = _said(perplexity("full", nll) + perplexity("int8", nll, kv_bytes_context=ROW))
    assert "nats can be excluded" in said


def test_a_peak_above_the_full_cache_and_what_would_settle_it_are_said() -> None:
    """The kind: a smaller cache that is recommended, and does not fit where the full one does."""
    scores = [1.0] * 15
    int4 = _run("int4", scores, 1 / 3, kv_bytes_peak_prefill=ROW * 1400, kv_bytes_peak=ROW * 400)
    found = findings(_run("full", scores, kv_bytes_peak=ROW * 1000) + int4).points
    assert headline(found).endswith(
        "can be excluded; about 22 prompts would settle it; it peaks at 140 % of the full cache's peak"
    )


@pytest.mark.parametrize(("points_", "told"), [(20, False), (21, True)])
def test_one_picked_from_many_says_so(points_: int, told: bool) -> None:
    many = [1.0] * 50 + [0.0] * 10
    records = _run("full", many) + [r for i in range(points_) for r in _run(f"s{i}", many, 0.5)]
    assert ("compared; no interval is adjusted for that" in _said(records)) is told


def _judged(records: list[dict[str, Any]], holm_p: float) -> str:
    ranked = rank(points(records))
    return headline(ranked.assign(holm_p=holm_p))


def test_a_verdict_that_many_comparisons_take_back_is_said_so() -> None:
    full, better = _run("full", [0.0] * 10 + [1.0] * 10), _run("int8", [1.0] * 20, 0.5)
    assert _judged(full + better, 0.04) == "int8 does better than the full cache at 50 % of its bytes"
    assert _judged(full + better, 0.06) == (
        "int8 does better than the full cache at 50 % of its bytes, which does not hold among all 1 compared (Holm)"
    )
    worse = _run("full", [1.0] * 20) + _run("int8", [0.0] * 20, 0.5)
    assert "Holm" not in _judged(worse, 0.04)
    assert _judged(worse, 0.06).endswith("; among all 1, 1 of these verdicts do not hold (Holm)")
