"""Every label that a table or page prints has an entry that says what it means and whether its number may be trusted."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

from harness.analysis import intervals as statistics
from harness.analysis.contrast import COLUMNS as CONTRASTS
from harness.analysis.curves import COLUMNS as CURVES
from harness.analysis.findings import findings
from harness.analysis.frontier import rank
from harness.analysis.point_warnings import WARNINGS
from harness.analysis.points import COLUMNS, points
from harness.pages import glossary, table
from harness.types import BYTE_KINDS, Record
from tests.support.record_factory import make, sweep


def _returned(function: object) -> set[str]:
    """The texts that a function can return, written there or named by a constant of its module."""
    tree = ast.parse(inspect.getsource(function))  # type: ignore[arg-type]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            for part in [node.value] if not isinstance(node.value, ast.IfExp) else [node.value.body, node.value.orelse]:
                found.add(part.value if isinstance(part, ast.Constant) else getattr(statistics, part.id))  # type: ignore[attr-defined]
    return found


def test_every_verdict_count_and_warning_has_an_entry() -> None:
    verdicts = _returned(statistics.verdict)
    assert {"", "equal within noise", "clearly below", "not resolved", "above", "below"} <= verdicts <= set(glossary.VERDICTS)
    counts = {name for name in COLUMNS if name.startswith("n_")} - {"n_prompts", "n_documents"}
    assert counts == set(glossary.COUNTS)
    assert set(WARNINGS) == set(glossary.WARNINGS)
    assert all(entry.printed and entry.meaning and entry.trust for _, entry in glossary.entries())


README = Path(__file__).parents[3] / "results" / "README.md"


def test_the_readme_shows_the_glossary_as_it_is() -> None:
    assert glossary.markdown() in README.read_text(encoding="utf-8")


def _named(section: str) -> set[str]:
    """The names in the first column of a section's table; `allocated_*` is all kinds of bytes."""
    text = README.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    names = {
        name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    }
    starred = {name for name in names if name.endswith("*")}
    return (names - starred) | {name.replace("*", kind) for name in starred for kind in BYTE_KINDS}


def test_the_readme_names_every_field_and_column_and_no_others() -> None:
    """The kind: a field or column that nobody says the meaning of, or that is gone."""
    assert _named("Records") == {field.name for field in fields(Record)}
    found = findings(sweep(stacks=["full", "int8"]))
    assert _named("Points") == set(found.points.columns)
    assert _named("curves.csv") == set(CURVES) and _named("contrasts.csv") == set(CONTRASTS)
    content = found.frontier
    assert _named("frontier.json") == {*content, *content["groups"][0]}


def test_a_printed_table_explains_the_labels_it_has_and_no_others() -> None:
    shown = " ".join(table.text(rank(points(sweep(stacks=["full", "int8", "random"])))).split())
    assert glossary.VERDICTS["equal within noise"].text in shown
    assert glossary.VERDICTS["clearly below"].text in shown
    assert glossary.VERDICTS["above"].meaning not in shown and glossary.FLAGS["simulated"].meaning not in shown
    few = [make(example_id=f"e{i}", stack=s, score=1.0, storage="simulated") for i in range(3) for s in ("full", "int8")]
    shown = " ".join(table.text(rank(points(few))).split())
    assert glossary.FLAGS["simulated"].text in shown
