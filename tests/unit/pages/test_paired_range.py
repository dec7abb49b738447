"""The default range of the paired view: it shows the bulk, names what lies beyond, and never hides what is better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.pages.looks import legend_height, looks
from harness.pages.paired_view import of_section, shown
from harness.pages.units import signed_small
from tests.support.record_factory import ROW, answer, grid, make, perplexity
from tests.support.stream_factory import stream


def table(values: list[float], reach: float = 0.01) -> pd.DataFrame:
    y = np.array(values)
    return pd.DataFrame({"y": y, "lo": y - reach, "hi": y + reach})


def test_a_broken_point_does_not_squash_the_rest() -> None:
    low, high = shown(table([0.0, 0.001, 0.02, 0.03, 0.05, 5.1]), cut=True)
    assert low == pytest.approx(-0.01)
    assert high == pytest.approx(0.06)


def test_the_full_cache_counts_so_one_broken_point_of_three_is_found() -> None:
    assert shown(table([0.001, 0.002, 5.0], reach=0.0005), cut=True)[1] == pytest.approx(0.0025)
    assert shown(table([5.0]), cut=True)[1] == pytest.approx(5.01)  # a single point is what there is to see


def test_nothing_is_left_out_where_that_gains_little() -> None:
    values = [0.1, 0.11, 0.12, 0.13, 0.14, 0.25]
    assert shown(table(values), cut=True) == (0.0, pytest.approx(0.26))


def test_scores_with_a_ceiling_are_never_cut() -> None:
    values = [-0.01] * 6 + [-0.9]
    assert shown(table(values), cut=False) == (pytest.approx(-0.91), 0.0)


def test_what_is_better_than_the_full_cache_is_always_shown() -> None:
    low, _ = shown(table([-3.0, 0.0, 0.001, 0.002, 0.003, 0.004, 9.0]), cut=True)
    assert low == -3.0


def test_an_endless_interval_ends_at_the_fence() -> None:
    known = table([0.01, 0.02, 0.03, 0.04, 0.05])
    known.loc[4, ["lo", "hi"]] = [-40.0, 40.0]
    low, high = shown(known, cut=True)
    assert -0.2 < low < 0 < 0.05 < high < 0.2


def test_equal_points_have_a_range() -> None:
    assert shown(table([0.0, 0.0, 0.0], reach=0.0), cut=True) == (0.0, 0.0)
    records = perplexity("full", [2.5, 2.8, 3.0]) + perplexity("same", [2.5, 2.8, 3.0], kv_bytes_context=ROW * 300)
    paired = of_section(rank(points(records)))
    assert paired is not None and paired.low < 0 < paired.high


def test_points_beyond_stand_at_the_edge_and_neighbours_in_rows(tmp_path: Path) -> None:
    records = stream(
        tmp_path, ["full", "h2o", "tova", "random", "sink", "recent", "snapkv", "knorm", "window", "x"], [0.25, 0.5, 0.8]
    )
    for record in records:
        record["score"] += {"window": 3.0, "x": 4.0}.get(record["stack"], 0.0)
    section = rank(points(records))
    paired = of_section(section)
    assert paired is not None
    beyond = section.loc[paired.edge.index]
    assert set(beyond["stack"]) == {"window", "x"} and len(beyond) == 6
    assert (paired.points.loc[beyond.index, "y"] > paired.high).all()
    assert paired.edge.between(paired.low, paired.high).all()
    for _, pair in beyond.groupby("bytes_context"):
        heights = dict(zip(pair["stack"], paired.edge[pair.index], strict=True))
        assert heights["x"] > heights["window"]  # same bytes: the larger loss stands higher
    inside = paired.points.drop(beyond.index)["y"].dropna()
    assert (inside <= paired.high).all()
    assert paired.title == "nats a token above the full cache (lower is better)"


def test_a_section_without_a_difference_has_no_paired_view() -> None:
    records = [answer(example, "h2o", 0.5) for example in grid(repeats=1)]
    assert of_section(rank(points(records))) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.101, "+0.10"), (-0.00041, "-0.00041"), (5.13, "+5.1"), (797.2, "+797"), (9.96, "+10"), (float("nan"), "–")],
)
def test_small_differences_keep_two_digits(value: float, text: str) -> None:
    assert signed_small(value) == text


def test_legends_list_the_full_cache_then_names_as_people_read_them() -> None:
    table = looks(["int16", "int2", "H2O", "full", "kivi2"], "full")
    assert sorted(table, key=lambda name: table[name].rank) == ["full", "H2O", "int2", "int16", "kivi2"]
    margin = {"t": 40, "b": 60}
    assert legend_height(5, 500, margin) == 500
    assert 500 < legend_height(25, 500, margin) < legend_height(200, 500, margin) == legend_height(300, 500, margin)


def test_a_section_without_any_score_has_no_paired_view() -> None:
    failed = dict(status="failed", score=None, error="no such luck", kv_bytes_context=None)
    records = [make(**example, stack=stack, **failed) for example in grid() for stack in ("full", "int8")]
    assert of_section(rank(points(records))) is None
