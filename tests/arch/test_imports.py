"""The rooms of the project: imports point down only, and every file says what it is responsible for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")])
ORDER = (
    "errors",
    "types",
    "files",
    "remote_code",
    "wheel",
    "typed",
    "paths",
    "package_data",
    "composition",
    "stages",
    "kv",
    "lm",
    "run",
    "command",
)  # harness/*.py beside them are commands
TASKS_MAY_SEE = ("types", "errors", "files", "remote_code", "package_data")


def room(module: str) -> str | None:
    """The room of a dotted module of this project."""
    parts = module.split(".")
    if parts[0] == "tasks":
        return "tasks"
    if parts[0] != "harness" or len(parts) < 2:
        return None
    return parts[1] if parts[1] in ORDER else "command"


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(str(node.module))
    return names


def of(path: Path) -> str | None:
    return room(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    mine = of(path)
    for name in imported(path):
        other = room(name)
        if other is None or mine is None or other == mine:
            continue
        if mine == "tasks":
            assert other in TASKS_MAY_SEE, f"tasks must not import {name}"
        elif other == "tasks":
            assert mine in ("run", "command"), f"{mine} must not import {name}"
        else:
            assert ORDER.index(other) < ORDER.index(mine), f"{mine} must not import {name}"


@pytest.mark.parametrize("room_name", ["stages"])
def test_stages_do_not_know_transformers(room_name: str) -> None:
    for path in (ROOT / "harness" / room_name).rglob("*.py"):
        assert not any(name.split(".")[0] in ("transformers", "hydra", "lm_eval") for name in imported(path)), path


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a first line says what the file is responsible for"
    assert len(text.splitlines()) <= 260, "a file has one responsibility"
