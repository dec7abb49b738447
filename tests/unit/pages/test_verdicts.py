"""Verdicts in words that can be read one way only: what was seen, how far it may be off, in which unit."""

from __future__ import annotations

import pytest

from harness.analysis.findings import findings
from harness.analysis.intervals import EQUAL, OPEN
from harness.pages.glossary import judged, verdict_text
from harness.pages.words.verdicts import NATS, Compared
from tests.support.record_factory import ROW, make, perplexity


@pytest.mark.parametrize(
    ("told", "words", "harmless"),
    [
        (Compared("below", -0.3, -0.5, -0.1, True), "worse", False),
        (Compared("below", 0.24, 0.12, 0.36, False, NATS), "worse", False),  # more nats are worse, whatever the sign
        (Compared("clearly below", -0.8, -0.9, -0.5, True), "clearly worse", False),
        (Compared("above", 0.2, 0.1, 0.3, True), "better", True),
        (Compared(EQUAL, 0.0, -0.1, 0.08, True), "equal within ±0.10", True),
        (Compared(EQUAL, 0.042, -0.00025, 0.084, False, NATS), "equal within ±0.084 nats", True),
        (Compared(OPEN, 0.0, -0.2039, 0.2039, True), "no loss seen (≤ 0.20)", True),
        (Compared(OPEN, 0.1, -0.05, 0.4, True), "no loss seen (≤ 0.05)", True),
        (Compared(OPEN, -0.1, -0.31, 0.1, True), "maybe worse (≤ 0.31)", False),
        (Compared(OPEN, 0.1, -0.1, 0.31, False, NATS), "maybe worse (≤ 0.31 nats)", False),
        (Compared(EQUAL, 0.01, 0.001, 0.02, False, NATS), "equal within ±0.020 nats", False),  # proven in its own unit
        (Compared("of another version", 0.0, 0.0, 0.0, True), "of another version", False),
    ],
)
def test_words_of_a_verdict(told: Compared, words: str, harmless: bool) -> None:
    assert verdict_text(told) == words
    assert told.harmless is harmless


def test_streams_are_told_in_nats() -> None:
    nll = [2.0 + 0.1 * i for i in range(12)]
    table = findings(perplexity("full", nll) + perplexity("int8", nll, kv_bytes_context=ROW)).points
    assert judged(table[table["stack"] == "int8"].iloc[0]) == "no loss seen (≤ 0.086 nats)"


def test_documents_that_settle_an_open_verdict_are_those_that_do() -> None:
    """Beside the verdict itself: one document fewer is open, so many are not."""

    def verdict(n: int) -> tuple[str, float]:
        run = [make(stack=s, example_id=f"e{i}", group_id=f"g{i}", score=1.0) for i in range(n) for s in ("full", "int4")]
        row = findings(run).points.set_index("label").loc["int4"]
        return row["vs_full"], row["settled_by"]

    assert verdict(15) == (OPEN, 22)
    assert verdict(21)[0] == OPEN and verdict(22)[0] == EQUAL


def test_an_open_verdict_of_graded_scores_is_settled_by_a_narrower_interval() -> None:
    scores = [0.5, 0.9, 0.1, 0.7, 0.3, 0.6]
    full = [make(stack="full", example_id=f"e{i}", group_id=f"g{i}", score=s) for i, s in enumerate(scores)]
    other = [make(stack="a", example_id=f"e{i}", group_id=f"g{i}", score=s) for i, s in enumerate(reversed(scores))]
    row = findings(full + other).points.set_index("label").loc["a"]
    half = (row["diff_hi"] - row["diff_lo"]) / 2
    assert row["vs_full"] == OPEN
    assert row["settled_by"] == pytest.approx(6 * (half / 0.15) ** 2, abs=1)
