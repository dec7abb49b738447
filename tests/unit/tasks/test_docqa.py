"""Questions on country reports: which number is asked, what fills the length, and the same prompts everywhere."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.types import Example, Tokens
from tasks import scoring
from tasks.docqa import DocQA
from tasks.docqa_records import Library, Line
from tests.support.byte_tokens import ByteTokens

ROOT = Path(__file__).resolve().parents[3]
BYTES = ByteTokens()
COUNTRIES = tuple(
    f"{start}{end}" for start in ("Al", "Bor", "Car", "Dor") for end in ("and", "duria", "nia", "tes", "via", "zo")
)
CATEGORIES = ("Geography", "Economy", "Energy")
ROW = re.compile(r"(?P<key>\w+ - Field \d+(, part)?): (?P<value>.*)")


@dataclass(frozen=True)
class Reports:
    """Countries with 3 x 12 fields, in the form of the country reports, HTML included."""

    countries: tuple[str, ...] = COUNTRIES
    fields: int = 12

    def reports(self) -> Mapping[str, dict[str, Any]]:
        return {f"land/{name}": self.report(name) for name in self.countries}

    def report(self, name: str) -> dict[str, Any]:
        rng = random.Random(name)
        categories: dict[str, Any] = {c: {f"Field {i}": self.field(rng) for i in range(self.fields)} for c in CATEGORIES}
        names = {"conventional short form": {"text": f"{name}<br>"}, "conventional long form": {"text": "Republic"}}
        return {**categories, "Government": {"Country name": names}}

    def field(self, rng: random.Random) -> dict[str, Any]:
        number, year = f"{rng.randrange(100_000, 9_999_999):,}", rng.randrange(1990, 2030)
        plain: dict[str, Any] = {"text": f"<p>{number} sq&nbsp;km ({year} est.)</p>", "note": "<b>note:</b> estimates"}
        parts: dict[str, Any] = {"part ": {"text": f"${number}"}, "note": {"text": "prose " * 60}}
        return rng.choice((plain, parts, {"text": "coal, timber"}))


def docqa(**settings: Any) -> DocQA:
    return DocQA(**{"reports": Reports(), "lengths": (2000,), "per_length": 12, "fields": (10, 14), **settings})


def size(task: DocQA, example: Example, tokens: Tokens = BYTES) -> int:
    prompt = tokens.prompt(example.context, example.question, example.answer_prefix, chat=task.chat)
    return len(prompt.ids) + example.max_new_tokens


def records(context: str) -> dict[str, list[str]]:
    """Lines by country."""
    parts = (part.split("\n") for part in context.split("\n\n"))
    return {heading.removeprefix("Report on "): lines for heading, *lines in parts}


def asked(example: Example) -> str:
    return example.answer_prefix.strip().removesuffix(":")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [600, 1300, 2000, 4000])
def test_the_length_is_filled_with_whole_lines(length: int, chat: bool) -> None:
    known = {line.text for report in Library.of(Reports().reports()).reports for line in report.lines}
    task = docqa(lengths=(length,), chat=chat)
    examples = task.examples(BYTES, None, seed=1)
    assert len(examples) == 12
    for example in examples:
        assert length - size(task, example) in range(300)  # three lines of a record at most
        found = records(example.context)
        assert len(found) == example.context.count("Report on ")
        assert all(line in known for lines in found.values() for line in lines)
        assert all(len(lines) >= 3 for lines in found.values())
        assert len(found[example.group_id]) <= 14


def test_the_number_asked_for_stands_once_in_its_record() -> None:
    for example in docqa(per_length=40).examples(BYTES, None, seed=0):
        number = example.answers[-1]
        lines = records(example.context)[example.group_id]
        assert sum(scoring.occurrences(line, number) for line in lines) == 1
        (line,) = [line for line in lines if line.startswith(asked(example) + ": ")]
        assert line == f"{asked(example)}: {example.answers[0]}"
        assert not scoring.occurrences(example.question + example.answer_prefix, number)
        assert number not in example.distractors
        assert all(any(other in line for line in lines) for other in example.distractors)


def test_no_other_record_gives_the_same_number_under_the_same_key() -> None:
    @dataclass(frozen=True)
    class Same:
        """Half of the countries have the same fields."""

        def reports(self) -> Mapping[str, dict[str, Any]]:
            found = dict(Reports().reports())
            for name in COUNTRIES[:12]:
                copy = Reports().report("Aland")
                found[f"land/{name}"] = {**copy, "Government": found[f"land/{name}"]["Government"]}
            return found

    task = docqa(reports=Same(), lengths=(1500,))
    for example in task.examples(BYTES, None, seed=0):
        for country, lines in records(example.context).items():
            same = f"{asked(example)}: {example.answers[0]}" in lines
            assert same == (country == example.group_id)
    assert {e.group_id for e in task.examples(BYTES, None, seed=0)} & set(COUNTRIES[:12])


def test_depth_is_where_the_line_stands() -> None:
    examples = docqa(lengths=(4000,), per_length=40).examples(BYTES, None, seed=0)
    for example in examples:
        heading = example.context.index(f"Report on {example.group_id}\n")
        before = example.context.index(f"{asked(example)}: {example.answers[0]}", heading)
        assert example.depth == pytest.approx(before / len(example.context), abs=0.051)
    assert len({example.depth for example in examples}) > 6
    places = [list(records(e.context)).index(e.group_id) for e in examples]
    assert len(set(places)) > 4


def test_swapped_values_belong_to_another_country() -> None:
    own = {r.country: {line.key: line.value for line in r.lines} for r in Library.of(Reports().reports()).reports}
    for example in docqa(swap=True, per_length=24).examples(BYTES, None, seed=0):
        key = asked(example)
        assert own[example.group_id][key] != example.answers[0]
        assert example.answers[0] in [values.get(key) for values in own.values()]
        for country, lines in records(example.context).items():
            for match in filter(None, map(ROW.fullmatch, lines)):
                values = {values[match["key"]] for values in own.values() if match["key"] in values}
                assert match["value"] in values
                assert match["value"] != own[country][match["key"]] or len(values) == 1


def test_the_baseline_asks_the_same_without_the_record() -> None:
    full = docqa().examples(BYTES, None, seed=0)
    task = docqa(baseline="no_context")
    assert task.name == "docqa_no_context" and docqa().name == "docqa"
    for example, alone in zip(full, task.examples(BYTES, None, seed=0), strict=True):
        assert alone.context == f"Report on {example.group_id}" and alone.depth is None
        assert (alone.id, alone.question, alone.answer_prefix) == (example.id, example.question, example.answer_prefix)
        assert (alone.answers, alone.distractors) == (example.answers, example.distractors)


def test_answers_that_know_nothing_score_nothing() -> None:
    task = docqa(swap=True, per_length=30)
    for example in task.examples(BYTES, None, seed=2):
        for stub in ("", example.answer_prefix, example.question, ", ".join(example.distractors)):
            assert task.score(example, stub).value == 0.0
        lines = records(example.context)[example.group_id]
        dump = task.score(example, ", ".join(line.split(": ", 1)[1] for line in lines))
        assert dump.value == 1.0 and dump.metrics["strict"] == 0.0 and dump.metrics["f1"] < 0.5
        for right in example.answers:
            said = task.score(example, f" {right}.").metrics
            assert said == {"contains": 1.0, "strict": 1.0, "exact": 1.0, "f1": 1.0}


def test_chance_is_the_score_of_another_number_of_the_record() -> None:
    assert [docqa(metric=metric).chance for metric in ("contains", "strict", "exact")] == [0.0, 0.0, 0.0]
    assert 0.0 < docqa(metric="f1").chance < 0.5
    bare = docqa(metric="f1", reports=Bare())
    assert bare.chance == 0.0


class Bare(Reports):
    """Numbers without units, which have no word in common."""

    def field(self, rng: random.Random) -> dict[str, Any]:
        return {"text": str(rng.randrange(10_000_000, 99_999_999))}


def digests(examples: Sequence[Example]) -> dict[str, str]:
    return {e.id: BYTES.prompt(e.context, e.question, e.answer_prefix, chat=False).sha256 + repr(e.answers) for e in examples}


def test_same_prompts_whatever_else_is_asked() -> None:
    everything = digests(docqa(lengths=(2000, 1300), per_length=12).examples(BYTES, None, seed=7))
    random.seed(99)
    turned = digests(docqa(lengths=(1300, 2000), per_length=12).examples(BYTES, None, seed=7))
    part = digests(docqa(lengths=(1300,), per_length=3).examples(BYTES, None, seed=7))
    assert everything == turned and len(everything) == 24
    assert part.items() <= everything.items()
    other = digests(docqa(lengths=(2000, 1300), per_length=12).examples(BYTES, None, seed=8))
    assert not set(other.values()) & set(everything.values())


def test_same_prompts_in_another_process() -> None:
    code = "from tests.unit.tasks.test_docqa import fingerprint; print(fingerprint())"
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == fingerprint()


def fingerprint() -> str:
    task = docqa(swap=True, per_length=6)
    return hashlib.sha256(repr((task.examples(BYTES, None, seed=11), task.chance)).encode()).hexdigest()


def test_a_limit_covers_all_lengths_and_many_countries_first() -> None:
    examples = docqa(lengths=(1300, 2000), per_length=16).examples(BYTES, None, seed=0)
    assert [e.length for e in examples[:4]] == [1300, 2000, 1300, 2000]
    assert [e.group_id for e in examples[::2]] == [e.group_id for e in examples[1::2]]
    assert len({e.group_id for e in examples}) == 16


def test_a_report_becomes_lines() -> None:
    report = {
        "Government": {"Country name": {"conventional short form": {"text": "none"}, "conventional long form": {"text": "The Isle (of) Man"}}},
        "Economy": {
            "Exports": {"Exports 2024": {"text": "$478.6 billion<br>(2024 est.)"}, "note": "<b>note:</b> no"},
            "Rate ": {"text": "-15.8% (2022 est.)", "male ": {"text": "1,024.5"}},
            "Background": {"text": "word " * 100},
            "Codes": {"text": "52 00 N, 20 00 E"},
            "Years": {"text": "1990-2020"},
            "Odd": "not a field",
        },
    }  # fmt: skip
    (found,) = Library.of({"x": report, "y": {}, "z": report}).reports
    assert found.country == "The Isle"
    assert [(line.key, line.value, line.number) for line in found.lines[2:]] == [
        ("Economy - Exports 2024", "$478.6 billion (2024 est.)", "478.6"),
        ("Economy - Rate", "-15.8% (2022 est.)", None),
        ("Economy - Rate, male", "1,024.5", "1,024.5"),
        ("Economy - Codes", "52 00 N, 20 00 E", None),
        ("Economy - Years", "1990-2020", None),
    ]
    assert found.lines[2].answers == ("$478.6 billion (2024 est.)", "$478.6 billion", "478.6")
    assert Line("k", "31,268,5").number is None


def test_refusals_name_key_value_and_limit() -> None:
    with pytest.raises(UserError, match=r"task\.lengths=\[512, 1024\].*largest usable length of this model is 512"):
        docqa(lengths=[512, 1024]).examples(ByteTokens(max_length=512), None, seed=0)
    with pytest.raises(UserError, match=r"task\.lengths=\[150\].*need \d+ tokens, and 3 fields must fit"):
        docqa(lengths=[150]).examples(BYTES, None, seed=0)
    with pytest.raises(UserError, match=r"task\.lengths=\[90000\].*all reports together are shorter"):
        docqa(lengths=[90000]).examples(BYTES, None, seed=0)
    with pytest.raises(UserError, match=r"task\.fields=\[60, 70\].*fewer than two reports have 60 fields"):
        docqa(fields=[60, 70])
    with pytest.raises(UserError, match=r"task\.digits=9 digits"):
        docqa(digits=9).examples(BYTES, None, seed=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lengths", []),
        ("lengths", 2000),
        ("lengths", ["2000"]),
        ("lengths", [2000, 2000]),
        ("per_length", 0),
        ("per_length", True),
        ("fields", [10]),
        ("fields", [14, 10]),
        ("fields", [2, 10]),
        ("fields", 10),
        ("digits", 0),
        ("swap", "false"),
        ("baseline", "chance"),
        ("query_aware", 1),
        ("chat", None),
        ("max_new_tokens", 0),
        ("metric", "bleu"),
        ("heading", "Report"),
        ("question", "What is {key}?"),
        ("answer_prefix", None),
        ("stop", [""]),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^task\.{key}="):
        docqa(**{key: value})


def test_the_yaml_is_the_schema_and_its_defaults() -> None:
    settings = OmegaConf.load(ROOT / "conf/task/docqa.yaml")
    assert set(settings) - {"_target_"} == {field.name for field in fields(DocQA)}
    plain: dict[str, Any] = OmegaConf.to_container(settings)  # type: ignore[assignment]
    for field in fields(DocQA):
        if field.name != "reports":
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            assert plain[field.name] == default, field.name


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"swap": True, "chat": True}])
def test_real_reports_fill_real_lengths(settings: dict[str, Any]) -> None:
    from harness.models.tokenizer import Tokenizer

    spec = instantiate(OmegaConf.load(ROOT / "conf/model/smollm2.yaml"))
    tokens = Tokenizer.load(spec.directory(), max_length=8192)
    changed = OmegaConf.merge(OmegaConf.load(ROOT / "conf/task/docqa.yaml"), settings, {"lengths": [1024, 2048, 8192]})
    task = instantiate(OmegaConf.merge(changed, {"per_length": 6}), _convert_="all")
    for example in task.examples(tokens, None, seed=0):
        assert example.length is not None
        assert example.length - size(task, example, tokens) in range(250)
        assert len(example.answers[-1].replace(",", "").replace(".", "")) >= 3
        assert len(tokens.encode(example.answers[0])) < example.max_new_tokens
    assert task.chance == 0.0
