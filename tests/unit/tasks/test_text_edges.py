"""Texts at the edge of what a text is: no words left, no spaces between words, unseen characters, half characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from tasks import scoring
from tasks.corpus import LocalText
from tasks.docqa import DocQA
from tasks.hub_qa import HubQA
from tasks.jsonl import JsonLines
from tasks.needle import Needle
from tests.support.byte_tokens import ByteTokens

COLUMNS = {"context": "context", "question": "question", "answers": "answers.text"}
HALF = "half of a surrogate pair"


@pytest.mark.parametrize("metric", scoring.METRICS)
@pytest.mark.parametrize("answer", ["", " ", "the", "An", "...", "\u200b"])
@pytest.mark.parametrize("references", [["A"], ["!"], [""], ["+", "\u200b"], []])
def test_nothing_matches_nothing(metric: str, answer: str, references: list[str]) -> None:
    """The kind: a normalisation that empties both sides (articles, punctuation, unseen characters) is no match."""
    assert scoring.judge(answer, references, metric=metric, rivals=["B"]).value == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "f1"),
    [
        ("A", "A", 1.0, 1.0),
        ("a.", "A", 1.0, 1.0),
        ("The A", "A", 0.0, 2 / 3),
        ("B", "A", 0.0, 0.0),
        ("the tower", "tower", 1.0, 1.0),
        ("A tower", "The tower", 1.0, 1.0),
    ],
)
def test_an_article_is_an_answer_where_it_is_all_of_it(answer: str, reference: str, exact: float, f1: float) -> None:
    metrics = scoring.judge(answer, [reference]).metrics
    assert (metrics["exact"], metrics["f1"]) == (exact, f1)


UNSPACED = {
    "Thai": ("เมืองหลวงของประเทศไทยคือกรุงเทพมหานครในปัจจุบัน", "กรุงเทพมหานคร", "เชียงใหม่"),
    "Lao": ("ນະຄອນຫຼວງຂອງລາວແມ່ນວຽງຈັນໃນປັດຈຸບັນ", "ວຽງຈັນ", "ຫຼວງພະບາງ"),
    "Khmer": ("រាជធានីនៃប្រទេសកម្ពុជាគឺភ្នំពេញសព្វថ្ងៃ", "ភ្នំពេញ", "សៀមរាប"),
    "Burmese": ("မြန်မာနိုင်ငံ၏မြို့တော်မှာနေပြည်တော်ဖြစ်သည်", "နေပြည်တော်", "မန္တလေး"),
    "Chinese": ("中国的首都是北京市", "北京", "上海"),
    "rare Chinese": ("他姓𠮷田先生", "𠮷田", "吉田"),
    "Japanese": ("日本の首都はとうきょうタワーです", "とうきょうタワー", "おおさか"),
    "Javanese": ("ꦏꦸꦛꦲꦶꦁꦗꦮꦆꦏꦸꦱꦭ", "ꦗꦮ", "ꦧꦭꦶ"),
}


@pytest.mark.parametrize("script", UNSPACED)
def test_an_answer_inside_a_sentence_without_spaces_is_found(script: str) -> None:
    """The kind: scripts written without spaces between words, known by their Unicode property, not by a list of ranges."""
    sentence, answer, other = UNSPACED[script]
    right, wrong = scoring.judge(sentence, [answer]).metrics, scoring.judge(sentence, [other]).metrics
    assert (right["contains"], wrong["contains"]) == (1.0, 0.0)
    assert right["f1"] > 0.0 and right["strict"] == 1.0


def test_a_letter_with_its_marks_is_one_word() -> None:
    assert scoring.contains("กิน", ["ก"]) == 0.0  # another syllable
    assert scoring.contains("ភ្នំ", ["ភ"]) == 0.0  # what is stacked below belongs to it
    assert scoring.contains("ราคา3,677บาท", ["3677"]) == 1.0
    assert scoring.contains("价格3,677元", ["3,677"]) == 1.0


@pytest.mark.parametrize("unseen", ["\u00ad", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u034f", "\ufe0f", "\u200e"])
def test_characters_that_are_not_seen_change_nothing(unseen: str) -> None:
    assert scoring.judge(f"It is a light{unseen}house.", ["lighthouse"]).metrics["strict"] == 1.0
    assert scoring.exact("lighthouse", [f"light{unseen}house"]) == 1.0
    assert scoring.contains(f"48{unseen}15", ["4815"]) == 1.0


def written(folder: Path, **changes: object) -> str:
    row = {"context": "Some text.", "question": "What?", "answers": ["that"]} | changes
    path = folder / "mine.jsonl"
    path.write_text('{"context": "c", "question": "q", "answers": ["x"]}\n' + json.dumps(row), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("group", [{}, {"group": "g"}])
@pytest.mark.parametrize("key", ["context", "question", "answers", "answer_prefix", "id", "group", "distractors"])
def test_half_a_character_in_a_data_file_names_file_and_line(key: str, group: dict[str, str], tmp_path: Path) -> None:
    """JSON may spell half of a surrogate pair, which no text can hold; it was a traceback, or a line without its place."""
    value: object = ["a \ud83d b"] if key in ("answers", "distractors") else "a \ud83d b"
    with pytest.raises(UserError, match=rf"^mine\.jsonl, line 2: {key} holds {HALF}"):
        JsonLines(path=written(tmp_path, **(group | {key: value})))


def squad(folder: Path, context: str, question: str) -> HubQA:
    asked = [{"id": "1", "question": question, "answers": [{"text": "that"}]}]
    path = folder / "squad.json"
    path.write_text("\ufeff" + json.dumps({"data": [{"paragraphs": [{"context": context, "qas": asked}]}]}), encoding="utf-8")
    return HubQA(name="squad", path=str(path), columns=COLUMNS)


def test_half_a_character_elsewhere_is_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"squad\.json.*paragraphs\[0\].*context holds {HALF}"):
        squad(tmp_path, "a \ud83d", "What?")
    with pytest.raises(UserError, match=rf"task\.question holds {HALF}"):
        Needle(question="\ud83d {key}")
    with pytest.raises(UserError, match=rf"task\.stop holds {HALF}"):
        JsonLines(path=written(tmp_path), stop="\ud83d")
    with pytest.raises(UserError, match=rf"task\.heading holds {HALF}"):
        DocQA(reports=None, heading="{country} \ud83d")  # type: ignore[arg-type]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """At the start of corpus texts, each file of a folder, data files, their later lines (files put together) and contexts."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\ufeffIn the beginning.", encoding="utf-8")
    corpus = LocalText(name="mine", licence="none", path=str(tmp_path))
    assert corpus.documents() == ("In the beginning.", "In the beginning.")
    (tmp_path / "a.txt").write_text("In the beginning.", encoding="utf-8")
    assert LocalText(name="mine", licence="none", path=str(tmp_path)).digest == corpus.digest
    row = json.dumps({"context": "\ufeffSome text.", "question": "What?", "answers": ["that"]})
    path = tmp_path / "mine.jsonl"
    path.write_text(f"\ufeff{row}\n\ufeff{row}\n", encoding="utf-8")
    assert [one.context for one in JsonLines(path=str(path)).examples(ByteTokens(), None, 0)] == ["Some text."] * 2
    assert squad(tmp_path, "\ufeffSome text.", "What?").questions[0].context == "Some text."
