"""The box under a page's title is made from points, manifests and YAMLs, and says nothing that these do not know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.findings import findings
from harness.files.paths import CONF
from harness.pages import glossary
from harness.pages.dashboard import write
from harness.pages.words.abouts import about
from harness.pages.words.columns import COLUMNS, tip
from harness.pages.words.page_tables import points_table
from tests.support.record_factory import grid, make
from tests.support.stream_factory import stream

MANIFEST = {
    "model": {"source": "wheel", "member": "some/Model.Q4_1.gguf", "dtype": "float32", "kv_dtype": "bfloat16"},
    "machine": {"processor": "<x86>", "cpus": 2, "accelerators": []},
    "config": {"task": {"context": 256}},
}


def _page(folder: Path, records: list[dict[str, Any]], manifest: dict[str, Any] | None) -> str:
    runs = {record["run_id"]: manifest for record in records} if manifest else None
    write(findings(records, folder), folder / "page.html", runs)
    text = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub("<[^>]*>", " ", text.split('id="looking"')[1].split("</details>")[0])


def test_it_says_model_examples_names_and_limits(tmp_path: Path) -> None:
    half = {"point": {"keep.budget.value": 0.25}, "stack_config": {"keep": {"budget": {"unit": "fraction", "value": 0.25}}}}
    records = [make(**e, stack=stack, **more) for e in grid() for stack, more in (("full", {}), ("h2o", half))]
    said = " ".join(_page(tmp_path, records, MANIFEST).split())
    assert "Model.Q4_1.gguf; weights computed in float32, keys and values stored in bfloat16" in said
    assert "Made on a CPU (&lt;x86&gt;, 2 cores)" in said
    assert re.search(r"\d+ prompts on \d+ documents|\d+ prompts", said) and "(asked for: " in said
    assert "0.25 of the context's tokens are kept" in said and "Nothing about contexts beyond" in said
    assert about("compress", "h2o") in said and about("task", "needle") in said


def test_it_says_nothing_that_is_not_known(tmp_path: Path) -> None:
    records = stream(tmp_path, ["full", "int8"], (0.5,))
    said = " ".join(_page(tmp_path, records, None).split())
    assert "weights computed" not in said and "Made on" not in said and "in a name" not in said
    assert "stream" in said and "document" in said


@pytest.mark.parametrize("kind", ["compress", "task"])
def test_every_stack_and_task_of_this_program_says_what_it_is(kind: str) -> None:
    for path in (CONF / kind).glob("*.yaml"):
        said = about(kind, path.stem)
        assert said and "\n" not in said, path
    assert about(kind, "no such one") == about(kind, "../config") == ""
    assert about("compress", "h2o, 8 sinks") == about("compress", "h2o")


def test_every_column_says_what_it_holds(tmp_path: Path) -> None:
    """The kind: a head that only its maker understands."""
    for records in ([make(**e, stack=s) for e in grid() for s in ("full", "int8")], stream(tmp_path, ["full", "int8"], (0.5,))):
        shown = findings(records, tmp_path).points
        table, _, _ = points_table(shown.assign(id=range(len(shown))), "t")
        heads = re.findall(r'title="([^"]*)"><button type="button">([^<]*)<', table)
        assert len(heads) > 20 and all(told.startswith(head.split(" (")[0].split(", ")[0]) for told, head in heads), heads
    assert {entry.printed for _, entry in glossary.entries()} >= set(COLUMNS)
    assert tip("frontier, question seen") == tip("frontier") != ""
