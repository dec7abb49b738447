"""Every method and task has a citation or says that there is no single paper; what is cited is what a run used."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from harness.citations.bibliography import bibtex, cited, entries, parsed, unknown
from harness.errors import UserError

CONF = Path(__file__).parents[3] / "conf"
MEMBERS = [
    f"{group}/{path.stem}" for group in ("compress", "keep", "codec", "task") for path in sorted((CONF / group).glob("*.yaml"))
]


def test_every_method_and_task_has_an_entry() -> None:
    known = {member for entry in entries() for member in entry.members}
    assert [member for member in MEMBERS if member not in known] == []


def test_every_paper_says_who_wrote_what_and_when_and_the_others_why_there_is_none() -> None:
    assert [key for key, times in Counter(entry.key for entry in entries()).items() if times > 1] == []
    for entry in entries():
        assert entry.members and all(re.fullmatch(r"[a-z]+/\w+", member) for member in entry.members), entry.key
        if entry.is_paper:
            assert entry.fields["title"] and re.fullmatch(r"(19|20)\d\d", entry.fields["year"]), entry.key
            assert re.fullmatch(r"\d{4}\.\d{4,5}", entry.fields.get("eprint", "0000.00000")), entry.key
            names = [name for name in entry.fields["author"].split(" and ") if name != "others" and name[0] != "{"]  # companies
            assert all(", " in name for name in names), entry.key
        else:
            assert entry.fields["note"].startswith("no single paper: ") and entry.key.startswith("none_")


def test_sources_in_the_code_agree_with_the_entries() -> None:
    """The kind: a method whose docstring names another paper than the one that is cited for it."""
    known = {entry.fields["eprint"] for entry in entries() if "eprint" in entry.fields}
    stages = CONF.parent / "harness" / "stages"
    named = {number for path in stages.rglob("*.py") for number in re.findall(r"arXiv\s+(\d{4}\.\d{5})", path.read_text())}
    assert named - known <= {"2108.12409"}  # ALiBi is a model's, not a method's


def test_a_run_cites_what_it_used_and_names_what_is_the_users_own() -> None:
    found = cited(["full", "h2o", "h2o, 8 sinks", "mine"], ["needle"])
    assert [(entry.key, names) for entry, names in found.items()] == [
        ("zhang2023h2o", ["h2o", "h2o, 8 sinks"]),
        ("kamradt2023needle", ["needle"]),
        ("hsieh2024ruler", ["needle"]),
        ("none_full", ["full"]),
    ]
    assert unknown(["full", "h2o", "h2o, 8 sinks", "mine"], ["needle", "my_task"]) == ["mine", "my_task"]
    lines = [entry.line for entry in found]
    assert lines[0] == (
        "Zhenyu Zhang, Ying Sheng, Tianyi Zhou and others: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of "
        "Large Language Models. 2023. arXiv:2306.14048"
    )
    assert lines[3].startswith("no single paper: ")


def test_a_bib_file_reads_back_and_holds_papers_only() -> None:
    text = bibtex(entries())
    assert "members" not in text and "no single paper" not in text
    assert [(one.key, one.fields) for one in parsed(text)] == [(one.key, one.fields) for one in entries() if one.is_paper]


def test_a_line_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match=r"citations\.bib"):
        parsed("@misc{a,\n  title: {x},\n}\n")
