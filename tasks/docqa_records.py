"""Country reports as lines of `Category - Field: value`, and which of them can be asked about."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from tasks.corpus import plain

_LONGEST = 200  # characters of a value; longer ones are prose, which is no record field
_NUMBER = re.compile(r"\$?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?![\w.,]*\d|[-/–]\d| \d)")
_REMARK = re.compile(r"\s*\([^()]*\)")
_NAMES = ("conventional short form", "conventional long form")


@dataclass(frozen=True)
class Line:
    """One field of a report: its key (`Category - Field` or `Category - Field, subfield`) and its value, one line of text."""

    key: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.key}: {self.value}"

    @cached_property
    def number(self) -> str | None:
        """The number that the value starts with, as written and without currency sign; None if it does not start with one."""
        found = _NUMBER.match(self.value)
        return found[1] if found else None

    @property
    def answers(self) -> tuple[str, ...]:
        """Accepted forms of this value: as written, without remarks in brackets, the number alone."""
        forms = (self.value, _REMARK.sub("", self.value), self.number or "")
        return tuple(dict.fromkeys(form.strip() for form in forms if form.strip()))


@dataclass(frozen=True)
class Report:
    """One country's lines, in the order of the source; keys are unique."""

    country: str
    lines: tuple[Line, ...]


class Reports(Protocol):
    """Where the records come from; `tasks.corpus.Factbook` is one."""

    def reports(self) -> Mapping[str, Mapping[str, Any]]:
        """Nested dictionaries by label: category -> field -> {"text": value}, or a dictionary of such subfields."""
        ...


@dataclass(frozen=True)
class Library:
    """All reports that name their country, in a fixed order."""

    reports: tuple[Report, ...]

    @staticmethod
    def of(reports: Mapping[str, Mapping[str, Any]]) -> Library:
        """From nested dictionaries by label: category -> field -> {"text": value} or subfields of that form.

        Reports without a country name, and a second report of the same name, are left out.
        """
        named: dict[str, Report] = {}
        for label in sorted(reports):
            country = _country(reports[label])
            if country and country not in named:
                named[country] = Report(country, _lines(reports[label]))
        return Library(tuple(named.values()))

    @cached_property
    def values(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        """By key: (country, value) of every report that has it."""
        found: dict[str, list[tuple[str, str]]] = {}
        for report in self.reports:
            for line in report.lines:
                found.setdefault(line.key, []).append((report.country, line.value))
        return {key: tuple(values) for key, values in found.items()}

    def window(self, report: Report, fields: int, rng: random.Random) -> tuple[Line, ...]:
        """That many consecutive lines from a random start, or the whole report if it is shorter."""
        start = rng.randrange(max(1, len(report.lines) - fields + 1))
        return report.lines[start : start + fields]

    def swapped(self, country: str, lines: Sequence[Line], rng: random.Random) -> tuple[Line, ...]:
        """The same keys, each with the value of another country; a value that every country shares stays."""
        return tuple(Line(line.key, self._other(country, line, rng)) for line in lines)

    def _other(self, country: str, line: Line, rng: random.Random) -> str:
        pool = [value for owner, value in self.values[line.key] if owner != country and value != line.value]
        return rng.choice(pool) if pool else line.value


def rivals(lines: Sequence[Line], asked: Line) -> tuple[str, ...]:
    """The other numbers that lines start with."""
    return tuple(dict.fromkeys(line.number for line in lines if line.number and line.number != asked.number))


def _country(report: Mapping[str, Any]) -> str:
    names = report.get("Government", {}).get("Country name", {})
    found = (plain(str(names.get(name, {}).get("text", ""))).split("(")[0].strip() for name in _NAMES)
    return next((name for name in found if name and name != "none"), "")


def _lines(report: Mapping[str, Any]) -> tuple[Line, ...]:
    lines: dict[str, Line] = {}
    for category, fields in report.items():
        for field, parts in fields.items():
            if isinstance(parts, dict):
                for key, value in _parts(field.strip(), parts):
                    lines.setdefault(key, Line(f"{category} - {key}", value))
    return tuple(lines.values())


def _parts(field: str, parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, value) of a field, or of each of its subfields; notes and prose are left out."""
    for part, inner in parts.items():
        held = inner if part == "text" else inner.get("text") if isinstance(inner, dict) else None
        value = " ".join(plain(held).split()) if isinstance(held, str) else ""
        if value and len(value) <= _LONGEST:
            name = part.strip()
            whole = field if part == "text" else name if name.startswith(field) else f"{field}, {name}"
            yield whole, value
