"""Who wrote the methods and tasks of a run: the entries of citations.bib by the YAML files they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from harness.errors import require

_HEAD = re.compile(r"@(\w+)\{([\w:-]+),$")
_FIELD = re.compile(r"\s+(\w+) = \{(.*)\},$")
_NAMED = 3  # authors that a line names before "and others"


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One paper, or a note that there is no single one.

    Attributes:
        kind: of BibTeX, such as `misc`; key: unique.
        fields: as BibTeX has them, without `members`.
        members: files below conf/ without their ending, such as `compress/h2o`.
    """

    kind: str
    key: str
    fields: Mapping[str, str]
    members: tuple[str, ...]

    @property
    def is_paper(self) -> bool:
        """Whether there is something to cite."""
        return "author" in self.fields

    @property
    def line(self) -> str:
        """Authors, title, year and arXiv number in plain words; the note where there is no paper."""
        if not self.is_paper:
            return self.fields["note"]
        place = f"arXiv:{self.fields['eprint']}" if "eprint" in self.fields else self.fields.get("howpublished", "")
        title = self.fields["title"] + ("" if self.fields["title"].endswith("?") else ".")
        return _plain(f"{self._authors()}: {title} {self.fields['year']}. {place}").strip()

    def _authors(self) -> str:
        names = self.fields["author"].split(" and ")
        short = [" ".join(reversed(name.split(", "))) for name in names[:_NAMED] if name != "others"]
        return ", ".join(short) + (" and others" if len(names) > len(short) else "")

    def bibtex(self) -> str:
        """The entry for a .bib file."""
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in self.fields.items())
        return f"@{self.kind}{{{self.key},\n{lines}}}\n"


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, in the order of the file."""
    return parsed(files("harness.citations").joinpath("citations.bib").read_text(encoding="utf-8"))


def parsed(text: str) -> tuple[Entry, ...]:
    """The entries of a .bib text with one field a line; UserError for a line that is none."""
    found: list[Entry] = []
    kind, key, fields = "", "", dict[str, str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            kind, key, fields = head[1], head[2], {}
        elif field := _FIELD.match(line):
            fields[field[1]] = field[2]
        elif line == "}":
            members = tuple(fields.pop("members", "").split(", "))
            found.append(Entry(kind=kind, key=key, fields=fields, members=members))
        else:
            require(
                not line or line.startswith("%"), "citations.bib", line, "@kind{key, then one `name = {value},` a line, then }"
            )
    return tuple(found)


def cited(stacks: Iterable[str], tasks: Iterable[str]) -> dict[Entry, list[str]]:
    """The entries of stacks and tasks, each with those it stands for; a changed stack counts as the one it was made of.

    Args:
        stacks: labels such as `h2o, 8 sinks`.
        tasks: names.
    """
    names = [(f"compress/{stack.split(',')[0]}", stack) for stack in stacks] + [(f"task/{task}", task) for task in tasks]
    uses = {entry.key: [name for member, name in names if member in entry.members] for entry in entries()}
    return {entry: uses[entry.key] for entry in entries() if uses[entry.key]}


def unknown(stacks: Iterable[str], tasks: Iterable[str]) -> list[str]:
    """Stacks and tasks that no entry stands for: those of the user's own."""
    stacks, tasks = list(stacks), list(tasks)
    known = {name for names in cited(stacks, tasks).values() for name in names}
    return [name for name in dict.fromkeys([*stacks, *tasks]) if name not in known]


def bibtex(found: Iterable[Entry]) -> str:
    """A .bib text of the papers among these entries."""
    return "\n".join(entry.bibtex() for entry in found if entry.is_paper)


def _plain(text: str) -> str:
    """BibTeX markup as the letters it stands for."""
    for markup, letter in {"{\\'e}": "é", "\\_": "_"}.items():
        text = text.replace(markup, letter)
    return text.replace("{", "").replace("}", "")
