"""The terminal table: what it says of noise, refusals and the frontier, and that it fits without a terminal."""

from __future__ import annotations

import re
from typing import Any

from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.pages import glossary, table
from harness.pages.units import iec, share_text
from tests.support.record_factory import ROW, grid, make, perplexity, sweep


def test_rows_are_sorted_by_bytes_and_fit() -> None:
    shown = table.text(rank(points(sweep())))
    lines = [line for line in shown.splitlines() if line.strip()]
    assert max(map(len, lines)) <= table.WIDTH
    assert lines[0].startswith("smollm2 · needle · query-agnostic · contains (higher is better)")
    names = [line.split()[0] for line in lines[3:60]]
    assert names[0] == "sink_h2o_int8"
    assert names[-1] == "full"
    (full,) = [line for line in lines if line.startswith(" full ")]
    assert "1.00 [0.91, 1.00]" in full and "base" in full and "100 %" in full and "55.4 MiB" in full


def test_it_says_equal_only_within_noise() -> None:
    shown = table.text(rank(points(sweep(stacks=["full", "int8", "random"]))))
    (int8,) = [line for line in shown.splitlines() if line.startswith(" int8 ")]
    assert "equal within ±0.09" in int8
    assert "clearly worse" in next(line for line in shown.splitlines() if line.startswith(" random 0.05"))
    few = [make(example_id=f"e{i}", group_id=f"g{i}", stack=s, score=1.0) for i in range(5) for s in ("full", "int8")]
    assert "no loss seen (≤ 0.43)" in table.text(rank(points(few)))
    assert "too few documents for a verdict" in table.text(rank(points(few[:-2])))


def test_counts_and_reasons_stand_below() -> None:
    records = sweep(stacks=["full"])
    records += [
        make(**e, stack="h2o [x]", score=None, status="refused", error="budget of 9 tokens is below 36") for e in grid()
    ]
    records += [make(**e, stack="lonely", score=1.0, run_id="other", storage="simulated") for e in grid()]
    shown = table.text(rank(points(records)), width=160)
    assert "h2o [x]: 40 refused - budget of 9 tokens is below 36 (40x)" in shown
    assert "h2o [x]: 40 refused" in shown and "not ranked" not in shown, "one line says it"
    assert "lonely: no comparison: no full-cache records in run other" in shown
    assert "simulated storage" in shown


def test_perplexity_says_its_direction() -> None:
    shown = table.text(rank(points(perplexity("full", [2.0, 2.1]) + perplexity("int8", [2.0, 2.1], kv_bytes_context=ROW))))
    assert "perplexity (lower is better)" in shown
    assert "7.79" in shown


def test_iec_units() -> None:
    wanted = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 163840: "160 KiB", 10**9: "954 MiB", 3 * 2**30: "3.00 GiB"}
    assert {value: iec(value) for value in wanted} == wanted
    assert iec(float("nan")) == "–"
    assert [share_text(ratio) for ratio in (0.3125, 1.0, 12.5)] == ["31.2 %", "100 %", "1,250 %"]


def test_tables_that_would_be_titled_alike_say_what_tells_them_apart() -> None:
    """The kind: two runs of one task under one title, so that nobody knows which table is which."""
    one = [make(**e, stack=stack, run_id="one") for e in grid() for stack in ("full", "int8")]
    two = [make(**e, stack=stack, run_id="two", seed=1) for e in grid() for stack in ("full", "int8")]
    same = [make(**e, stack="full", run_id="three", seed=1) for e in grid()]

    def titles(records: list[dict[str, Any]]) -> list[str]:
        return [line.strip() for line in table.text(rank(points(records))).splitlines() if " is better)" in line]

    alike = "smollm2 · needle · query-agnostic · contains (higher is better)"
    assert titles(one) == [alike]
    assert titles(one + two) == [f"{alike} · seed 0", f"{alike} · seed 1"]
    assert titles(one + two + same) == [f"{alike} · {run}" for run in ("one", "two", "three")]


def test_a_verdict_of_many_words_folds_no_label() -> None:
    few = [make(example_id=f"e{i}", stack=s, score=1.0) for i in range(4) for s in ("full", "a_stack_with_a_long_name")]
    shown = table.text(rank(points(few)))
    (line,) = [line for line in shown.splitlines() if line.startswith(" a_stack_with_a_long_name ")]
    assert "too few docs" in line and line.rstrip().endswith("●")
    assert "too few docs: too few documents for a verdict: " in shown, "in full below"


def test_a_verdict_that_does_not_hold_among_all_points_is_marked_and_stays() -> None:
    ranked = rank(points(sweep(stacks=["full", "int8", "random"])))
    plain, marked = table.text(ranked.assign(holm_p=0.01)), table.text(ranked.assign(holm_p=0.2))
    assert "‡" not in plain and "clearly worse ‡" in marked and not re.search("equal within \\S+ ‡", marked)
    assert glossary.FLAGS["holm"].meaning in " ".join(marked.split())
