"""Answer scores on hand-made answers; the right values are written out."""

from __future__ import annotations

import pytest

from harness.errors import UserError
from tasks import scoring


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("42.", 1.0),
        ("The answer is 42", 1.0),
        (" 42\n", 1.0),
        ("**42**", 1.0),
        ("“42”", 1.0),
        ("４２", 1.0),
        ("forty-two", 0.0),
        ("4 2", 0.0),
        ("142", 0.0),
        ("425", 0.0),
        ("4.2", 0.0),
        ("42.5", 0.0),
        ("-42", 0.0),
        ("42,000", 0.0),
        ("a42", 0.0),
        ("", 0.0),
        ("   \n", 0.0),
    ],
)
def test_contains_42(answer: str, right: float) -> None:
    assert scoring.contains(answer, ["42"]) == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("3125", "12", 0.0),
        ("in 1973", "7", 0.0),
        ("3,677 seated", "3,677", 1.0),
        ("3677", "3,677", 1.0),
        ("3,677", "3677", 1.0),
        ("1234567,7654321", "1234567", 1.0),
        ("It was NEW   york!", "New York", 1.0),
        ("new yorker", "new york", 0.0),
        ("John’s Dog", "john's dog", 1.0),
        ("Straße", "STRASSE", 1.0),
        ("e\u0301te\u0301", "\u00e9t\u00e9", 1.0),
        ("temperature -5 today", "-5", 1.0),
        ("temperature −5 today", "-5", 1.0),
        ("pages 3-5", "5", 1.0),
        ("答案是东京。", "东京", 1.0),
        ("हिन्दी भाषा", "हिन्दी", 1.0),
        ("the value is 0F3b91aa-1f2e-4c55-9a0b-d06d1f0c7e11.", "0f3b91aa-1f2e-4c55-9a0b-d06d1f0c7e11", 1.0),
        ("anything", "", 0.0),
        ("anything", "!?", 0.0),
        ("a.b", "a b", 1.0),
        ("axb", "a.b", 0.0),
    ],
)
def test_contains(answer: str, reference: str, right: float) -> None:
    assert scoring.contains(answer, [reference]) == right


@pytest.mark.parametrize(
    ("answer", "references", "rivals", "right"),
    [
        ("8231946", ["8231946"], [], 1.0),
        ("8,231,946, yes 8231946.", ["8231946"], [], 1.0),
        ("8231946 and 1111111", ["8231946"], [], 0.0),
        ("8231946 and 1111111", ["8231946"], ["1111111"], 0.0),
        ("1111111", ["8231946"], ["1111111"], 0.0),
        ("willow", ["willow"], ["copper", "granite"], 1.0),
        ("willow copper", ["willow"], ["copper", "granite"], 0.0),
        ("New York", ["New York"], ["York"], 1.0),
        ("York, New York", ["New York"], ["York"], 0.0),
        ("Paris or paris", ["Paris"], ["London"], 1.0),
        ("12 of 12", ["12", "twelve"], [], 1.0),
        (
            "0f3b91aa-1f2e-4c55-9a0b-d06d1f0c7e11 1f3b91aa-1f2e-4c55-9a0b-d06d1f0c7e11",
            ["0f3b91aa-1f2e-4c55-9a0b-d06d1f0c7e11"],
            [],
            0.0,
        ),
    ],
)
def test_strict(answer: str, references: list[str], rivals: list[str], right: float) -> None:
    assert scoring.strict(answer, references, rivals) == right


def test_any_of_several_references() -> None:
    references = ["forty-two", "42"]
    assert scoring.contains("It is forty two", references) == 1.0
    assert scoring.exact("42!", references) == 1.0
    assert scoring.f1("42", references) == 1.0


def test_exact_drops_articles_only() -> None:
    assert scoring.exact("The Seine.", ["seine"]) == 1.0
    assert scoring.exact("river Seine", ["seine"]) == 0.0
    assert scoring.contains("vitamin a", ["Vitamin A"]) == 1.0


def test_f1_by_hand() -> None:
    # said {cat, sat, mat}, wanted {cat, mat}: precision 2/3, recall 1, F1 0.8
    assert scoring.f1("the cat sat mat", ["a cat, the mat"]) == pytest.approx(0.8)
    assert scoring.f1("nothing alike", ["cat"]) == 0.0
    assert scoring.f1("", ["cat"]) == 0.0
    assert scoring.f1("cat", []) == 0.0
    # a repeated word counts as often as it is wanted
    assert scoring.f1("cat cat cat", ["cat"]) == pytest.approx(0.5)


def test_judge_stores_every_score_and_picks_the_headline() -> None:
    score = scoring.judge("The river Seine", ["Seine"], metric="f1")
    assert score.value == score.metrics["f1"] == pytest.approx(2 / 3)
    assert score.metrics == {"contains": 1.0, "strict": 1.0, "exact": 0.0, "f1": score.value}
    with pytest.raises(UserError, match="metric='bleu'"):
        scoring.judge("x", ["x"], metric="bleu")


def test_normalising_twice_changes_nothing() -> None:
    for text in ("John's 3,677.50 -5 a_b «x» 1-2 東京", "½ · ﬁne\t\u00a0x"):
        assert scoring.normalise(scoring.normalise(text)) == scoring.normalise(text)
