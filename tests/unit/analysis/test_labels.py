"""Names of points, and of stacks in figures: only what tells them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.findings import findings
from harness.analysis.labels import bits_of, label_of, shortened
from harness.pages import dashboard
from tests.support.browser import content
from tests.support.record_factory import grid, make


def test_what_all_siblings_have_is_left_out() -> None:
    stacks = ["full", "keydiff, recent 0", "keydiff, recent 0, always", "int8, keys alone"]
    assert list(shortened(stacks).values()) == ["full", "keydiff", "keydiff, always", "int8, keys alone"]
    assert shortened(["keydiff", "keydiff, always"]) == {"keydiff": "keydiff", "keydiff, always": "keydiff, always"}


@pytest.mark.parametrize(
    ("stack", "point", "wanted"),
    [
        ("palu", {"keys.rank.value": 0.3, "values.rank.value": 0.3}, "palu rank=0.3"),
        ("palu", {"keys.rank.value": 0.3, "values.rank.value": 0.5}, "palu keys rank=0.3, values rank=0.5"),
        ("int4", {"keys.bits": 2}, "int4 keys bits=2"),
        ("int4", {"values.bits": 2}, "int4 values bits=2"),
        ("int4", {"values.bits": 2, "keys.bits": 2}, "int4 bits=2"),
        ("int4", {"keys.bits": 2, "values.residual": 2}, "int4 keys bits=2, values residual=2"),
        ("h2o", {"keep.budget.value": 0.5, "keys.bits": 4, "values.bits": 4}, "h2o 0.5 bits=4"),
        ("h2o, 8 sinks", {"keep.budget.value": 0.5, "keys.bits": 4}, "h2o, 8 sinks at 0.5, keys bits=4"),
        ("x", {"keys.inner.bits": 4, "values.inner.bits": 2}, "x keys bits=4, values bits=2"),
        ("full", {}, "full"),
    ],
)
def test_what_keys_and_values_share_is_said_once(stack: str, point: dict[str, Any], wanted: str) -> None:
    config = {"keep": {"budget": {"unit": "fraction", "value": 0.25}}}
    assert label_of({"stack": stack, "stack_config": config, "point": point}) == wanted


def test_names_stay_apart() -> None:
    """The kind: two stacks under one name, whatever their own names are made of."""
    for stacks in (["a, x", "a, x, x"], ["a, b", "a", "a, b, c"], ["", ", x", ", x, y"], ["a, x, y", "a, y, x"]):
        assert len(set(shortened(stacks).values())) == len(stacks)


def test_a_page_draws_short_names(tmp_path: Path) -> None:
    names = {
        "full": {},
        "keydiff, recent 0": {"keep.budget.value": 0.5},
        "keydiff, recent 0, always": {"keep.budget.value": 0.5},
    }
    records = [make(**e, stack=stack, point=point) for e in grid() for stack, point in names.items()]
    dashboard.write(findings(records), tmp_path / "page.html")
    found = content(tmp_path / "page.html")
    lines = {trace["name"] for trace in found["figures"]["s0-frontier"]["data"]}
    assert {"full", "keydiff", "keydiff, always"} <= lines and not any("recent" in name for name in lines)
    assert set(found["figures"]["s0-bytes0"]["data"][0]["y"]) == {"full", "keydiff 0.5", "keydiff, always at 0.5"}
    assert {one["label"] for one in found["heat"]["s0-heat0"]} >= {"keydiff 0.5", "keydiff, always at 0.5"}


def test_bits_of_a_codec() -> None:
    places = {"exact.Exact": 16, "int8.Int8": 8, "int8_static.Int8Static": 8, "fp8.Float8": 8, "other.Mine": None}
    places |= {"nv_float.NvFloat4": 4}
    for place, bits in places.items():
        assert bits_of({"_target_": f"harness.stages.codec.{place}"}) == bits
    assert bits_of({"_target_": "harness.stages.codec.int_groups.IntGroups", "bits": 3}) == 3
    inner = {"_target_": "harness.stages.codec.int8.Int8"}
    assert bits_of({"_target_": "harness.stages.codec.hadamard.Hadamard", "inner": inner}) == 8
    assert bits_of(None) is None
