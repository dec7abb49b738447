"""Own questions: real files, good and bad, and prompts longer than the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.errors import UserError
from tasks.jsonl import JsonLines
from tests.support.byte_tokens import ByteTokens

ROOT = Path(__file__).resolve().parents[3]
BYTES = ByteTokens()
GOOD = {"context": "Anna has 12 apples.", "question": "How many apples?", "answers": ["12", "twelve"]}


def written(folder: Path, *rows: object) -> str:
    """A file of these rows; texts go in as they are."""
    path = folder / "mine.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_lines_become_examples(tmp_path: Path) -> None:
    full = {**GOOD, "answers": "12", "answer_prefix": "She has", "id": "a1", "group": 7, "distractors": ["13"]}
    task = JsonLines(path=written(tmp_path, GOOD, "", full), stop="\n", max_new_tokens=5)
    first, second = task.examples(BYTES, None, seed=0)
    assert (first.id, first.context, first.question, first.answer_prefix) == (
        "1",
        GOOD["context"],
        "\n\nHow many apples?",
        "",
    )
    assert first.answers == ("12", "twelve") and first.stop == ("\n",) and first.max_new_tokens == 5
    assert (second.id, second.group_id, second.answers, second.answer_prefix) == ("a1", "7", ("12",), "\nShe has")
    assert second.distractors == ("13",) and not second.truncated
    same = JsonLines(path=task.path, chat=True).examples(BYTES, None, seed=1)
    assert same[1].answer_prefix == "She has"


def test_questions_on_one_context_share_a_group(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "question": "Who?"}, {**GOOD, "context": "Else."}]
    one, two, three = JsonLines(path=written(tmp_path, *rows)).examples(BYTES, None, seed=0)
    assert one.group_id == two.group_id != three.group_id


def test_white_space_of_the_file_is_kept(tmp_path: Path) -> None:
    row = {**GOOD, "question": " Then?", "answer_prefix": " So"}
    (example,) = JsonLines(path=written(tmp_path, row)).examples(BYTES, None, seed=0)
    assert (example.question, example.answer_prefix) == (" Then?", " So")


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "dos.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + json.dumps({**GOOD, "id": "x\u2028y"}).encode())
    assert [e.id for e in JsonLines(path=str(path)).read()] == ["1", "x\u2028y"]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("{'context': 1}", "not JSON, .* at column 2"),
        ('{"context": "x"', "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[1, 2]", "a list where an object"),
        ('"text"', "a str where an object"),
        ({"question": "q", "answers": "a"}, "context is missing"),
        ({"context": "c", "answers": "a"}, "question is missing"),
        ({"context": "c", "question": "q"}, "answers is missing"),
        ({**GOOD, "context": 5}, "context=5 is not a text"),
        ({**GOOD, "context": " "}, "context is empty"),
        ({**GOOD, "question": None}, "question=None is not a text"),
        ({**GOOD, "question": ""}, "question and answer_prefix are both empty"),
        ({**GOOD, "answers": 12}, "answers=12 is not a text or a list of texts"),
        ({**GOOD, "answers": [12]}, r"answers=\[12\] is not"),
        ({**GOOD, "answers": []}, r"answers=\[\] holds no word"),
        ({**GOOD, "answers": ["?!"]}, ".* holds no word"),
        ({**GOOD, "answer-prefix": "x"}, "unknown key 'answer-prefix'"),
        ({**GOOD, "id": [1]}, r"id=\[1\] is not"),
        ({**GOOD, "group": 1.5}, "group=1.5 is not"),
        ({**GOOD, "distractors": {}}, r"distractors=\{\} is not"),
        ({**GOOD, "id": "1"}, "id '1' is also on an earlier line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, wrong: str) -> None:
    with pytest.raises(UserError, match=f"^mine.jsonl, line 3: {wrong}") as refused:
        JsonLines(path=written(tmp_path, GOOD, "", row))
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cases = {"": "name a file", "none.jsonl": "No such file", ".": "Is a directory"}
    for name, wrong in cases.items():
        with pytest.raises(UserError, match=rf"task\.path=.*{wrong}"):
            JsonLines(path=str(tmp_path / name) if name else None)
    with pytest.raises(UserError, match=r"task\.path=.* holds no line"):
        JsonLines(path=written(tmp_path, "", "  "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"context": "caf\xe9"}')
    with pytest.raises(UserError, match=r"is not UTF-8 text: byte 16"):
        JsonLines(path=str(tmp_path / "latin.jsonl"))


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_prompt_beyond_the_model(tmp_path: Path, at: float) -> None:
    filler = "x " * 340
    cutpoint = int(len(filler) * at)
    row = {**GOOD, "context": filler[:cutpoint] + " 12 " + filler[cutpoint:]}
    path = written(tmp_path, {**GOOD, "id": "short"}, {**row, "id": "long"})
    tokens = ByteTokens(max_length=512)
    n = len(tokens.prompt(row["context"], "\n\n" + str(GOOD["question"]), "", chat=False).ids) + 32
    with pytest.raises(UserError, match=rf"mine.jsonl, example long: prompt and answer take {n} tokens and the model has 512"):
        JsonLines(path=path).examples(tokens, None, seed=0)
    for side, kept in (("left", at >= 0.5), ("middle", at != 0.5)):
        short, long = JsonLines(path=path, truncate=side).examples(tokens, None, seed=0)
        assert not short.truncated and long.truncated
        assert len(tokens.prompt(long.context, long.question, long.answer_prefix, chat=False).ids) + 32 == 512
        assert ("12" in long.context) == kept
        assert long.question.strip() == GOOD["question"]
    assert len(JsonLines(path=path).examples(ByteTokens(), None, seed=0)) == 2


def test_truncation_leaves_whole_characters_and_needs_room(tmp_path: Path) -> None:
    path = written(tmp_path, {**GOOD, "context": "é" * 400})
    for side in ("left", "middle"):
        (example,) = JsonLines(path=path, truncate=side).examples(ByteTokens(max_length=256), None, seed=0)
        assert set(example.context.replace("\ufffd", "")) == {"é"} and example.context.count("\ufffd") <= 1
    with pytest.raises(UserError, match="question and answer alone do not leave room in 40 tokens"):
        JsonLines(path=path, truncate="left").examples(ByteTokens(max_length=40), None, seed=0)


def test_headline_is_the_metric_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    for metric, right in {"contains": 1.0, "strict": 1.0, "exact": 0.0, "f1": 0.4}.items():
        task = JsonLines(path=path, metric=metric)
        (example,) = task.examples(BYTES, None, seed=0)
        score = task.score(example, "She has 12 apples.")
        assert score.value == pytest.approx(right) == score.metrics[metric]
        assert set(score.metrics) == {"contains", "strict", "exact", "f1"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", 5),
        ("max_new_tokens", 0),
        ("max_new_tokens", "32"),
        ("metric", "rouge"),
        ("chance", 1.0),
        ("chance", "0"),
        ("truncate", "right"),
        ("query_aware", None),
        ("chat", "yes"),
        ("stop", 3),
        ("stop", ["a", ""]),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^task\.{key}="):
        JsonLines(**{"path": written(tmp_path, GOOD), key: value})


def test_the_yaml_is_the_schema_and_its_defaults(tmp_path: Path) -> None:
    settings = OmegaConf.load(ROOT / "conf/task/jsonl.yaml")
    assert set(settings) - {"_target_"} == set(JsonLines.__dataclass_fields__)
    settings.path = written(tmp_path, GOOD)
    assert instantiate(settings, _convert_="all") == JsonLines(path=settings.path)
