"""Right or wrong: compares one answer with its references.

Every number here reads *normalised* text (`normalise`). A score against several references is the best over them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import regex

from harness.errors import require
from harness.types import Score

METRICS = ("contains", "strict", "exact", "f1")

_APOSTROPHES = re.compile(r"['’ʼ`]")
_THOUSANDS = re.compile(r"(?<!\w)(?<!\d[.,])\d{1,3}(?:,\d{3})+(?!\w|,\d)")
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# A letter of a script written without spaces between words, with its marks and what is stacked below it. Line breaking class
# SA names most of them (Thai, Lao, Khmer, Burmese and their kin), AK and AS Javanese, Balinese and others.
_UNSPACED = regex.compile(
    r"(?V1)[[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}"
    r"\p{Script_Extensions=Han}\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}\p{Script=Hangul}\p{Script=Yi}]"
    r"&&\p{L}](?:\p{M}|(?<=\p{Indic_Syllabic_Category=Invisible_Stacker})\p{L})*"
)
_POINT = re.compile(r"(?<=\d)\.(?=\d)")
_MINUS = re.compile(r"(?<![\w)\]-])[-−](?=\d)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_UUID = re.compile(r"[0-9a-f]{8}( [0-9a-f]{4}){3} [0-9a-f]{12}")
_ARTICLES = frozenset({"a", "an", "the"})


@lru_cache(maxsize=8)  # one long context is asked about several values in a row
def normalise(text: str) -> str:
    """Words of a text, one space apart: what all scores compare.

    In order: Unicode NFKC and case folding, without characters that are not seen (soft hyphens, zero-width spaces and
    joiners); apostrophes dropped (`john's` -> `johns`); each letter of a script without spaces between words (Chinese,
    Japanese, Thai, Khmer ...) is a word of its own, with its marks; commas dropped inside a number grouped by thousands
    (`3,677` -> `3677`); every other character that is no letter or digit becomes a space, save a decimal point between
    digits and a minus sign that starts a number. Digits are never joined over a space (`4 2` stays two words) and words
    are never read as numbers.
    """
    text = _IGNORABLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    text = _APOSTROPHES.sub("", unicodedata.normalize("NFKC", text))
    text = _UNSPACED.sub(r" \g<0> ", _MINUS.sub("\x01", text))
    text = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    text = _POINT.sub("\x00", text)
    text = "".join(c if c.isalnum() or unicodedata.category(c).startswith("M") or c in "\x00\x01" else " " for c in text)
    return " ".join(text.replace("\x00", ".").replace("\x01", "-").split())


def occurrences(text: str, value: str) -> int:
    """How often a value occurs in a text as whole words, both normalised; 0 for a value without words."""
    wanted = normalise(value)
    return len(_whole(wanted).findall(normalise(text))) if wanted else 0


def contains(answer: str, references: Sequence[str]) -> float:
    """1.0 if a reference occurs in the answer at word boundaries; the lenient score that most papers report."""
    return float(any(occurrences(answer, reference) for reference in references))


def strict(answer: str, references: Sequence[str], rivals: Sequence[str] = ()) -> float:
    """1.0 if a reference occurs in the answer and no other value that could be meant does.

    Values that could be meant: any of `rivals`, and, if a reference is a number or a UUID, any other value of that
    form. So an answer that dumps every value of the context is right by `contains` and wrong here.
    """
    if not contains(answer, references):
        return 0.0
    rest = normalise(answer)
    wanted = sorted(filter(None, map(normalise, references)), key=len, reverse=True)
    for reference in wanted:
        rest = _whole(reference).sub("|", rest)  # no word contains "|", so the words around it stay apart
    form = _form(wanted)
    other = form is not None and _whole_pattern(form.pattern).search(rest) is not None
    named = any(_whole(rival).search(rest) for rival in map(normalise, rivals) if rival)
    return float(not other and not named)


def exact(answer: str, references: Sequence[str]) -> float:
    """1.0 if the answer is a reference, without articles (SQuAD); a reference without words matches nothing."""
    pairs = (_contents(answer, reference) for reference in references)
    return float(any(wanted and said == wanted for said, wanted in pairs))


def f1(answer: str, references: Sequence[str]) -> float:
    """Word-overlap F1 with the best reference, 0..1, without articles (SQuAD); 0 if either has no words."""
    return max((_overlap(*_contents(answer, reference)) for reference in references), default=0.0)


def judge(answer: str, references: Sequence[str], *, metric: str = "contains", rivals: Sequence[str] = ()) -> Score:
    """All scores of one answer, the headline picked by `metric` (one of METRICS)."""
    require(metric in METRICS, "metric", metric, f"one of {', '.join(METRICS)}")
    metrics = {
        "contains": contains(answer, references),
        "strict": strict(answer, references, rivals),
        "exact": exact(answer, references),
        "f1": f1(answer, references),
    }
    return Score(value=metrics[metric], metrics=metrics)


def _whole(normalised: str) -> re.Pattern[str]:
    return _whole_pattern(re.escape(normalised))


def _whole_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\S)(?:{pattern})(?!\S)")


def _form(wanted: Sequence[str]) -> re.Pattern[str] | None:
    """The form of all references (number, UUID), if values of that form can be recognised in prose; else None."""
    return next((form for form in (_NUMBER, _UUID) if wanted and all(map(form.fullmatch, wanted))), None)


def _contents(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """Words of both without articles; with them if the reference has no other words (the choice `A`)."""
    said, wanted = normalise(answer).split(), normalise(reference).split()
    bare = [word for word in wanted if word not in _ARTICLES]
    return ([word for word in said if word not in _ARTICLES], bare) if bare else (said, wanted)


def _overlap(said: Sequence[str], wanted: Sequence[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
