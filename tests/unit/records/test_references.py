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
    """The references that are committed: those of LATER are among them once they were run."""
    return rebuild.REFERENCES | {name: runs for name, runs in rebuild.LATER.items() if (REFERENCE / name).is_dir()}


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
    monkeypatch.setattr(rebuild, "ALL", {"one": (rebuild.Run("harness a=b", rebuild.POINTS, "x_", ("full", "h2o 1")),)})
    (tmp_path / "one").mkdir()
    assert rebuild.main(["one"]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "one").iterdir()} == {
        "x_points.csv": "points.csv", "x_frontier.json": "frontier.json", "x_contrasts.csv": "against/contrasts.csv",
    }  # fmt: skip
    assert asked[0] == ["harness", "a=b", "results_dir=results/one"] and asked[1][-4:] == [
        "--against",
        "full",
        "--against",
        "h2o 1",
    ]
    assert rebuild.main(["two"]) == 2


def test_the_study_is_every_task_under_seventy_stacks_and_more(rebuild: ModuleType) -> None:
    composed = [compose(shlex.split(run.command)[1:]) for run in rebuild.REFERENCES["study"]]
    assert {(one.task._target_.rsplit(".", 1)[1], one.task.get("query_aware")) for one in composed} == {
        ("Needle", False), ("Needle", True), ("DocQA", False), ("Stream", None),
    }  # fmt: skip
    assert all(len(one.stacks) >= 70 for one in composed)
    assert {one.model.source for one in composed} == {"wheel", "gguf"}  # a second family
    assert len({run.prefix for run in rebuild.REFERENCES["study"]}) == len(composed)


def test_the_first_look_is_what_make_run_runs(rebuild: ModuleType) -> None:
    """The Makefile asks for both modes of a needle in one sweep, the reference for one after the other."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").replace("results_dir=$(FIRST) ", "")
    needle, aware, stream = (run.command for run in rebuild.LATER["first-look"])
    assert aware == f"{needle} task.query_aware=true"
    assert f"{needle} task.query_aware=false,true".replace("harness ", "harness -m ") in recipe
    assert stream in recipe


def test_a_command_that_fails_ends_the_rebuild(rebuild: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "results" / "reference"
    home.mkdir(parents=True)
    monkeypatch.setattr(rebuild, "HERE", home)
    monkeypatch.setattr(rebuild, "ALL", {"one": (rebuild.Run("harness.status /nowhere/at/all"),)})
    assert rebuild.main(["one"]) == 2
