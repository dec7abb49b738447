"""The rooms of the project: imports point down only, folders stay small, and every file says what it is responsible for."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")])
VALUES = ("errors", "fields", "types", "files")
STACK = (*VALUES, "stages", "kv", "models", "engine")
SETUP = (*STACK, "tasks", "configure", "calibrate", "lm_eval")
READING = (*VALUES, "records", "analysis", "citations")
SEES: dict[str, tuple[str, ...]] = {  # a room -> the rooms it may import from; the commands see all of them
    "errors": (),
    "fields": (),
    "types": ("errors",),
    "files": ("errors", "types"),
    "stages": VALUES,
    "kv": (*VALUES, "stages"),
    "models": (*VALUES, "stages", "kv"),
    "engine": STACK,
    "families": STACK,
    "tasks": VALUES,
    "lm_eval_yaml": (*VALUES, "tasks", "configure"),
    "configure": (*STACK, "tasks"),
    "calibrate": (*STACK, "configure"),
    "lm_eval": (*STACK, "tasks", "configure", "calibrate"),
    "records": VALUES,
    "citations": ("errors",),
    "evaluation": (*SETUP, "records", "analysis"),
    "analysis": (*VALUES, "records"),
    "pages": READING,
    "advice": (*STACK, "tasks", "configure", *READING, "pages", "planning"),
    "planning": (*STACK, "configure", *READING, "pages"),
    "timing": (*STACK, "configure", *READING, "pages"),
    "sweep": (*SETUP, *READING, "evaluation", "pages"),
}
MEMBERS = ("score", "layers", "heads", "merge", "transform", "codec", "share", "tasks")  # folders of members of one kind
MOST_FILES, MOST_LINES, MEDIAN_LINES = 16, 250, 100


def room(module: str) -> str | None:
    """The room of a dotted module of this project; None for other projects' modules."""
    parts = module.split(".")
    if parts[0] == "tasks":  # what lm-eval itself loads is no task: it builds ours
        return "lm_eval_yaml" if "lm_eval_yaml" in parts else "tasks"
    if parts[0] != "harness" or len(parts) < 2:
        return None
    return parts[1] if parts[1] in SEES else "command"


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "harness"}
    return names


def wrong_arrows(mine: str | None, source: str) -> list[str]:
    """Modules that a file of a room imports and may not."""
    if mine is None or mine == "command":
        return []
    found = ((name, room(name)) for name in imported(ast.parse(source)))
    return sorted(name for name, other in found if other not in (None, mine, *SEES[mine]))


def of(path: Path) -> str | None:
    return room(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert wrong_arrows(of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("mine", "line"),
    [
        ("stages", "from harness.kv.attention import NAME"),
        ("kv", "import harness.engine.engine"),
        ("pages", "from harness.engine.engine import Engine"),
        ("analysis", "def f():\n    from harness.pages.table import show"),
        ("tasks", "from harness import kv"),
        ("evaluation", "from harness.pages.table import show"),
        ("records", "import harness.verify"),
    ],
)
def test_a_planted_arrow_is_found(mine: str, line: str) -> None:
    assert wrong_arrows(mine, line)


def test_stages_and_records_know_no_transformers() -> None:
    for name in ("stages", "records", "analysis", "citations", "pages"):
        for path in (ROOT / "harness" / name).rglob("*.py"):
            others = {one.split(".")[0] for one in imported(ast.parse(path.read_text()))}
            assert not others & {"transformers", "hydra", "lm_eval"}, path


def test_a_page_computes_no_score_and_only_outputs_asks_for_findings() -> None:
    """Points, ranks and curves are computed once a report, and handed to the terminal, the files and the page."""
    computing = {
        "harness.analysis.points": {"points", "cells"},
        "harness.analysis.frontier": {"rank", "frontier"},
        "harness.analysis.curves": {"curves"},
        "harness.analysis.contrast": {"contrasts"},
        "harness.analysis.findings": {"findings"},
    }
    found = set()
    for path in (ROOT / "harness" / "pages").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names} & computing.get(str(node.module), set())
                found |= {(path.name, name) for name in names}
    assert found == {("outputs.py", "findings"), ("outputs.py", "contrasts")}


def test_folders_and_files_are_small() -> None:
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(p): n for p, n in folders.items() if n > MOST_FILES and p.name not in MEMBERS} == {}
    lines = {path: len(path.read_text().splitlines()) for path in FILES if path.name != "__init__.py"}
    assert {str(path): n for path, n in lines.items() if n > MOST_LINES} == {}
    assert median(lines.values()) <= MEDIAN_LINES


def test_no_module_name_stands_twice() -> None:
    names = Counter(path.name for path in FILES if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_say_what_they_are_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
