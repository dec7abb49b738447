"""The command that a page gives for a point makes that point's records and no other, in the folder of its run."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.support.browser import content
from tests.support.started import harness

STACKS = """stacks=[int8,["h2o","compress.keep.sinks=8","compress.keep.budget.value=0.25"]]"""
RUN = ("model=tiny_llama", "task=needle", "task.lengths=[256]", "task.per_cell=1", "limit=1", "progress=false")


def test_a_points_command_finds_its_records_made(tmp_path: Path) -> None:
    done = harness(*RUN, STACKS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.glob("results/*/dashboard.html")
    points = content(page)["points"]
    parts = [[points[part]["names"][place] for place in points[part]["of"]] for part in ("run", "stack", "point")]
    commands = dict(zip(points["label"], (shlex.split(" ".join(words)) for words in zip(*parts, strict=True)), strict=True))
    (changed,) = (command for label, command in commands.items() if label.startswith("h2o, 8 sinks"))
    assert changed[-3:] == ["compress=h2o", "compress.keep.sinks=8", "compress.keep.budget.value=0.25"]
    count = sum(len(path.read_text().splitlines()) for path in page.parent.glob("records-*.jsonl"))
    for command in commands.values():
        assert command[:3] == ["python", "-m", "harness"]
        again = harness(*command[3:], "progress=false", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    assert sum(len(path.read_text().splitlines()) for path in page.parent.glob("records-*.jsonl")) == count
    assert len(list(tmp_path.glob("results/*"))) == 1
