"""Values at the seams of a run have types, and frozen values are set once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = ("evaluation", "engine", "records")  # rooms whose values all have a type; what files hold is `files.json_values`
FILES = sorted(path for place in ("harness", "tasks") for path in (ROOT / place).rglob("*.py"))


def names(source: str) -> set[str]:
    """Every name and every attribute's name in a source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        found |= {node.id} if isinstance(node, ast.Name) else set()
        found |= {node.attr} if isinstance(node, ast.Attribute) else set()
        found |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
    return found


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name in TYPED], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_value_at_a_seam_is_of_any_type(path: Path) -> None:
    assert "Any" not in names(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_set_on_a_frozen_object(path: Path) -> None:
    """What is read otherwise than it is given is `fields.read_as`, a property, or an object that is not frozen."""
    assert "__setattr__" not in names(path.read_text())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from typing import Any\n", "Any"),
        ("import typing\ndef f(**fields: typing.Any) -> None: ...", "Any"),
        ('object.__setattr__(self, "stop", ())', "__setattr__"),
    ],
)
def test_a_planted_one_is_found(line: str, name: str) -> None:
    assert name in names(line)
