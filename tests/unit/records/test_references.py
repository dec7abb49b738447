"""The committed references: one script makes them again, with the commands that their READMEs name."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.configure.compose import compose

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "results" / "reference"
BY_HAND = {".png", ".md"}


@pytest.fixture(scope="module")
def rebuild() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rebuild", REFERENCE / "rebuild.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["rebuild"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(readme: Path) -> list[list[str]]:
    """The words of the commands that a README names, without `python -m`; reports are part of the run before them."""
    text = readme.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    python -m ")]
    return [shlex.split(line, comments=True)[2:] for line in lines]


def made_here(rebuild: ModuleType) -> dict[str, tuple[Any, ...]]:
    """The references that are committed: the study is one of them once it was run."""
    there = {rebuild.STUDY: rebuild.STUDIED} if (REFERENCE / rebuild.STUDY).is_dir() else {}
    return rebuild.REFERENCES | there


def test_every_reference_has_its_commands(rebuild: ModuleType) -> None:
    assert set(made_here(rebuild)) == {path.parent.name for path in REFERENCE.glob("*/README.md")}
    for name, runs in made_here(rebuild).items():
        named = commands(REFERENCE / name / "README.md")
        assert [shlex.split(run.command) for run in runs] == [one for one in named if one[0] != "harness.report"], name
        reports = [tuple(one[3::2]) for one in named if one[0] == "harness.report"]
        assert set(reports) == {run.against for run in runs if run.against}, name


def test_every_committed_file_but_photographs_comes_from_a_run(rebuild: ModuleType) -> None:
    for name, runs in made_here(rebuild).items():
        made = {run.prefix + file for run in runs for file in run.files}
        made |= {f"{run.prefix}contrasts.csv" for run in runs if run.against}
        made |= {Path(word).name for run in runs for word in shlex.split(run.command)[1:] if word.startswith("out=")}
        committed = {path.name for path in (REFERENCE / name).iterdir() if path.suffix not in BY_HAND}
        assert committed == {one.removeprefix("out=") for one in made}, name


def test_a_reference_is_copied_from_the_run_that_its_command_names(
    rebuild: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last printed line is the folder; what is committed of it is copied under its prefix, contrasts beside it."""
    run = tmp_path / "results" / "run"
    (run / "against").mkdir(parents=True)
    for file in ("points.csv", "frontier.json", "against/contrasts.csv"):
        (run / file).write_text(file)
    asked: list[list[str]] = []

    def last_line(command: list[str]) -> str:
        asked.append(command)
        return str(run)

    monkeypatch.setattr(rebuild, "HERE", tmp_path)
    monkeypatch.setattr(rebuild, "_last_line", last_line)
    monkeypatch.setattr(rebuild, "REFERENCES", {"one": (rebuild.Run("harness a=b", rebuild.POINTS, "x_", ("full", "h2o 1")),)})
    (tmp_path / "one").mkdir()
    assert rebuild.main(["one"]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "one").iterdir()} == {
        "x_points.csv": "points.csv", "x_frontier.json": "frontier.json", "x_contrasts.csv": "against/contrasts.csv",
    }  # fmt: skip
    assert asked[0] == ["harness", "a=b"] and asked[1][-4:] == ["--against", "full", "--against", "h2o 1"]
    assert rebuild.main(["two"]) == 2


def test_the_study_is_every_task_of_two_models_under_forty_stacks_and_more(rebuild: ModuleType) -> None:
    composed = [compose(shlex.split(run.command)[1:]) for run in rebuild.STUDIED]
    assert {(one.model.source, one.task._target_.rsplit(".", 1)[1], one.task.get("query_aware")) for one in composed} == {
        (source, *task)
        for source in ("wheel", "gguf")
        for task in (("Needle", False), ("Needle", True), ("DocQA", False), ("Stream", None))
    }
    assert len(set(composed[0].stacks)) >= 40
    assert len({run.prefix for run in rebuild.STUDIED}) == len(composed)


def test_a_command_that_fails_ends_the_rebuild(rebuild: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "REFERENCES", {"one": (rebuild.Run("harness.status /nowhere/at/all"),)})
    assert rebuild.main([]) == 2
