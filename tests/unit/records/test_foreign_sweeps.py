"""A sweep's folder may be anybody's: what its summary says is read as names, and said in one line where it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.files.plain_files import printable
from harness.records.sweep_folder import runs


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps([{"run": "a\0b"}]),
        json.dumps([{"run": "\ud800"}]),
        json.dumps([{"run": 3}]),
        json.dumps([{"run": "x", "cwd": "\0"}]),
        json.dumps({"run": "x"}),
    ],
    ids=["nested", "zero byte", "half a character", "a number", "its folder", "no list"],
)
def test_a_summary_that_names_no_run_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match="is not the summary of a sweep") as refused:
        runs(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_what_cannot_be_seen_is_spelled(tmp_path: Path) -> None:
    seen = printable("a\u200bb\u00adc\u2060d\U000e0041e\u202ef\x1b[2J")
    assert seen == "a\\u200bb\\xadc\\u2060d\\U000e0041e\\u202ef\\x1b[2J"
    assert printable("می\u200cروم") == "می\u200cروم", "letters of Persian are joined with one"
