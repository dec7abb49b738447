"""The README's numbers: each claim is a line of a committed reference, named beside it, and each printed table is one of its tables.

Behind results stands `<!-- FILE; LABEL; COLUMN ... -->`: the numbers before it on its line, in their order, are those columns of
that point of that file under results/reference, rounded as they are written; of contrasts the label is `ONE against OTHER`.
Numbers of names and settings stand in backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from harness.pages import table

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "results" / "reference"
CLAIM = re.compile(r"<!-- (?P<file>\S+\.csv); (?P<label>[^;]+); (?P<columns>[^;]+) -->")
NUMBER = re.compile(r"(?<![\w.,])[+-]?\d+(?:\.\d+)?(?: ?%)?(?![\w])")
RESULT = re.compile(r"(?<![\w.-])[+-]?\d+\.\d|\d ?%|\[[+-]?\d")  # decimals, percentages, intervals
NOT_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|!\[[^\]]*\]")


def prose() -> Iterator[str]:
    """The lines of the README outside its blocks of code."""
    fenced = False
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def claims() -> list[tuple[str, str, str, str]]:
    """(words, file, label, columns) of every claim; a line may hold several, each beside its own words."""
    found = []
    for line in prose():
        start = 0
        for match in CLAIM.finditer(line):
            found.append((line[start : match.start()], match["file"], match["label"], match["columns"]))
            start = match.end()
    return found


def printed() -> list[str]:
    """Lines of the table in the README, its columns apart by one space."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("prints (", 1)[1].split("```")[1]
    return [" ".join(line.split()) for line in text.splitlines() if line.strip(" ─")]


def plain(words: str) -> str:
    return NOT_TEXT.sub(" ", words)


def test_the_printed_table_is_that_of_the_command_before_it() -> None:
    """Its lines are among those that the reference's points print, and the README's command is the reference's."""
    shown = table.text(pd.read_csv(REFERENCE / "needle-smollm2" / "points.csv"))
    assert len(printed()) > 3 and set(printed()) <= {" ".join(line.split()) for line in shown.splitlines()}
    command = next(
        line for line in (REFERENCE / "needle-smollm2" / "README.md").read_text().splitlines() if "python -m" in line
    )
    assert f"\n{command.strip()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_claims() -> None:
    assert len(claims()) >= 5


@pytest.mark.parametrize(("words", "file", "label", "columns"), claims())
def test_a_claim_is_a_line_of_its_reference(words: str, file: str, label: str, columns: str) -> None:
    frame = pd.read_csv(REFERENCE / file)
    against = label.split(" against ") if "against" in frame else [label]
    rows = frame[frame["label"].eq(against[0]) & (frame["against"].eq(against[1]) if len(against) == 2 else True)]
    assert len(rows) == 1, (file, label)
    written = NUMBER.findall(plain(words))
    assert len(written) == len(columns.split()), (written, columns)
    for text, column in zip(written, columns.split(), strict=True):
        assert as_written(float(rows[column].iloc[0]), text) == text.replace(" %", "").lstrip("+"), (
            column,
            rows[column].iloc[0],
        )


def as_written(value: float, text: str) -> str:
    """The value with as many decimals as the text has, in percent where the text is."""
    digits = len(text.removesuffix("%").strip().partition(".")[2])
    rounded = f"{value * (100 if text.endswith('%') else 1):.{digits}f}"
    return rounded.removeprefix("-") if float(rounded) == 0 else rounded


def test_every_number_that_was_measured_is_a_claim() -> None:
    """What is left of the lines without their claims has no decimals, percentages or intervals."""
    for line in prose():
        rest = line[max((match.end() for match in CLAIM.finditer(line)), default=0) :]
        assert not RESULT.search(plain(rest)), line
