"""Questions that hold their own answer: what only repeats them is no answer, what answers them is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.types import Example
from tasks import echo
from tasks.hub_qa import HubQA
from tasks.jsonl import JsonLines
from tests.support.byte_tokens import ByteTokens

COLUMNS = {"context": "context", "question": "question", "answers": "answers.text", "id": "id"}
LONG = "We were told that the code of the old door at the end of the yard is 4711 or 4712; which one of them is it?"


def jsonl(folder: Path, *rows: dict[str, object]) -> JsonLines:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"context": "Some text.", **row}) for row in rows), encoding="utf-8")
    return JsonLines(path=str(path))


def squad(folder: Path, *rows: dict[str, object]) -> HubQA:
    asked = [
        {"id": str(n), "question": row["question"], "answers": [{"text": a} for a in row["answers"]]}  # type: ignore[attr-defined]
        for n, row in enumerate(rows)
    ]
    path = folder / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "Some text.", "qas": asked}]}]}), encoding="utf-8")
    return HubQA(name="squad", path=str(path), columns=COLUMNS, question="{question}", answer_prefix="")


@pytest.mark.parametrize("make", [jsonl, squad])
@pytest.mark.parametrize(
    ("question", "answer", "output", "right"),
    [
        ("Was it Paris or London?", "Paris", "Was it Paris or London?", 0.0),
        ("Was it Paris or London?", "Paris", "\n\nwas it PARIS or London", 0.0),
        ("Was it Paris or London?", "Paris", "Was it Paris or London? Was it Paris or Lon", 0.0),
        ("Was it Paris or London?", "Paris", "Was it Paris or", 0.0),
        ("Was it Paris or London?", "Paris", "Paris", 1.0),
        ("Was it Paris or London?", "Paris", "It was Paris.", 1.0),
        ("Was it Paris or London?", "Paris", "Was it Paris or London? Paris", 1.0),
        ("Was it Paris or London?", "Paris", "London", 0.0),
        ("Who wrote it, William Shakespeare or Marlowe?", "Shakespeare", "William Shakespeare", 1.0),
        ("Did team A or team B win the cup of 1994?", "team B", "team B win the cup of 1994", 1.0),
        (LONG, "4711", LONG, 0.0),
        (LONG, "4711", LONG[:80], 0.0),
        (LONG, "4711", "4711", 1.0),
        (LONG, "4711", "the code of the old door at the end of the yard is 4711 or", 0.0),
        ("What is it?", "Paris", "What is it? Paris", 1.0),
    ],
)
def test_an_echo_is_no_answer(make: object, tmp_path: Path, question: str, answer: str, output: str, right: float) -> None:
    """The kind: an output that repeats what was asked scored 1.0 by every score where the question holds its answer."""
    task = make(tmp_path, {"question": question, "answers": [answer]})  # type: ignore[operator]
    (example,) = task.examples(ByteTokens(), None, 0)
    metrics = task.score(example, output).metrics
    assert metrics["contains"] == right
    if not right:
        assert metrics == {"contains": 0.0, "strict": 0.0, "exact": 0.0, "f1": 0.0}


def test_an_echo_of_the_prefix_is_no_answer(tmp_path: Path) -> None:
    row = {"question": "Which city?", "answers": ["Paris"], "answer_prefix": "The city, Paris or not, is"}
    task = jsonl(tmp_path, row)
    (example,) = task.examples(ByteTokens(), None, 0)
    assert task.score(example, " The city, Paris or not, is").metrics["contains"] == 0.0
    assert task.score(example, "Which city? The city, Paris or not, is").metrics["contains"] == 0.0
    assert task.score(example, " Paris").metrics["exact"] == 1.0


def test_how_many_is_said_at_load(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "Paris or London?", "answers": ["Paris"], "id": "one"},
        {"question": "Which city?", "answers": ["Paris"], "id": "two"},
        {"question": "Which?", "answers": ["Lima", "Rome"], "answer_prefix": "Of Rome and Oslo:", "id": "three"},
    ]
    task = jsonl(tmp_path, *rows)
    (line,) = task.notices(task.examples(ByteTokens(), None, 0))
    assert "in 2 of 3 examples" in line and "one" in line
    assert jsonl(tmp_path, rows[1]).notices(jsonl(tmp_path, rows[1]).read()) == []


@pytest.mark.parametrize(("question", "prefix"), [("Paris?", ""), ("Which?", "Paris:"), ("", "paris")])
def test_a_question_that_is_the_answer_is_refused(tmp_path: Path, question: str, prefix: str) -> None:
    with pytest.raises(UserError, match=r"mine\.jsonl, line 1: .* is an answer itself"):
        jsonl(tmp_path, {"question": question, "answer_prefix": prefix, "answers": ["Paris"]})


def test_the_same_in_a_data_set_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1: .* is an answer itself"):
        squad(tmp_path, {"question": "Which?", "answers": ["Rome"]}, {"question": "Paris?", "answers": ["Paris"]})


def test_answers_elsewhere_are_left_as_they_are() -> None:
    example = Example(id="1", context="c", question="Which city?", answer_prefix="It is", answers=("Paris",))
    assert echo.without_echo("Which city? It is Paris", example) == "Which city? It is Paris"
