"""The command that a page gives for a point: what its run was asked, its stack as it was spelled, its point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.findings import findings
from harness.pages import dashboard
from tests.support.browser import content
from tests.support.record_factory import make

ASKED = [
    "model=m",
    "task=needle",
    "task.lengths=[256]",
    "stacks=[a,b]",
    "redo=true",
    "compress.keep.sinks=4",
    "codec@compress.keys=int4",
]


def _command(
    tmp_path: Path, manifest: dict[str, Any] | None, stack: str, point: dict[str, Any] | None = None, **more: Any
) -> str:
    records = [make(stack=name, point=at, run_id="r", **more) for name, at in (("full", {}), (stack, point or {}))]
    dashboard.write(findings(records), tmp_path / "page.html", {"r": manifest} if manifest else None)
    points = content(tmp_path / "page.html")["points"]
    return " ".join(filter(None, (points[part]["names"][points[part]["of"][1]] for part in ("run", "stack", "point"))))


BASE = "python -m harness model=m task=needle 'task.lengths=[256]'"


@pytest.mark.parametrize(
    ("stack", "point", "spelled", "wanted"),
    [
        ("int8", {}, None, "compress=int8"),
        ("h2o", {"keep.budget.value": 0.1}, None, "compress=h2o compress.keep.budget.value=0.1"),
        ("h2o, 8 sinks", {}, "h2o compress.keep.sinks=8", "compress=h2o compress.keep.sinks=8"),
        ("a b", {"keep.x": 1}, "a ~compress.keep.y keep.x=1", "compress=a '~compress.keep.y' compress.keep.x=1"),
        ("h2o, 8 sinks", {}, None, ""),
        ("int8; rm -rf /", {}, None, "'compress=int8; rm -rf /'"),
    ],
)
def test_a_point_is_spelled_as_it_was_asked_for(
    tmp_path: Path, stack: str, point: dict[str, Any], spelled: str | None, wanted: str
) -> None:
    name = stack + "".join(f" {key}={value}" for key, value in point.items())
    manifest = {"command": ASKED, "spellings": {name: [spelled]} if spelled else {}}
    assert _command(tmp_path, manifest, stack, point) == f"{BASE} {wanted}".strip()


def test_without_a_manifest_it_is_what_the_records_know(tmp_path: Path) -> None:
    asked = "python -m harness model=smollm2 task=needle task.query_aware=true compress=int8"
    assert _command(tmp_path, None, "int8", query_aware=True) == asked
    for broken in ({"command": "model=m"}, {"command": None, "spellings": []}, {"spellings": {"int8": []}}):
        assert _command(tmp_path, broken, "int8", query_aware=True) == asked


def test_a_stack_with_points_of_its_own_and_a_sweep_give_the_point_in_its_mode(tmp_path: Path) -> None:
    """The kind: overrides with blanks in them, and a sweep's lists where one job had one value."""
    listed = "[{keep.budget.value: 0.25}, {keep.budget.value: 0.5}]"
    manifest = {
        "command": ["-m", "task=needle,stream", "task.lengths=[256,512]", "task.query_aware=false,true", "limit=5,9"],
        "spellings": {"snapkv keep.budget.value=0.25": [f"snapkv compress.points={listed} keep.budget.value=0.25"]},
        "config": {"limit": 9},
    }
    at: dict[str, Any] = {"keep.budget.value": 0.25}
    assert _command(tmp_path, manifest, "snapkv", at, query_aware=True) == (
        "python -m harness task=needle 'task.lengths=[256,512]' task.query_aware=true limit=9 "
        "compress=snapkv compress.keep.budget.value=0.25"
    )
    unknown = manifest | {"config": {}}
    assert _command(tmp_path, unknown, "snapkv", at).startswith("python -m harness -m task=needle,stream ")
