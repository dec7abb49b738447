"""Records one after another, cut to a number of tokens at whole lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LEAST_LINES = 3  # a record cut shorter tells nothing and is left out

Count = Callable[[str], int]


@dataclass(frozen=True)
class Record:
    """A heading and the lines below it."""

    heading: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join((self.heading, *self.lines))

    def cut(self, room: int, count: Count) -> Record | None:
        """The first lines that fit into `room` tokens with the heading and the gap before it; None below LEAST_LINES."""
        room -= count("\n\n" + self.heading)
        kept = 0
        for line in self.lines:
            room -= count("\n" + line)
            if room < 0:
                break
            kept += 1
        return Record(self.heading, self.lines[:kept]) if kept >= LEAST_LINES else None

    def shorter(self) -> Record | None:
        """Without its last line; None below LEAST_LINES."""
        return Record(self.heading, self.lines[:-1]) if len(self.lines) > LEAST_LINES else None


@dataclass(frozen=True)
class Shelf:
    """A context: the record asked about among other records."""

    before: tuple[Record, ...]
    target: Record
    after: tuple[Record, ...]

    @staticmethod
    def fill(target: Record, others: Iterator[Record], room: int, share: float, count: Count) -> Shelf:
        """As many other records as fit into `room` tokens, about `share` of these tokens before the target."""
        first = int(room * share)
        before = _taken(others, first, count)
        return Shelf(before, target, _taken(others, room - _size(before, count), count))

    @property
    def records(self) -> tuple[Record, ...]:
        return (*self.before, self.target, *self.after)

    @property
    def text(self) -> str:
        return "\n\n".join(record.text for record in self.records)

    def up_to(self, line: int) -> str:
        """The text before that line of the target."""
        start = "".join(f"{record.text}\n\n" for record in self.before)
        return start + "\n".join((self.target.heading, *self.target.lines[:line])) + "\n"

    def shorter(self) -> Shelf | None:
        """With one line of the other records less; None if there is no other record."""
        if self.after:
            return Shelf(self.before, self.target, _trimmed(self.after))
        return Shelf(_trimmed(self.before), self.target, ()) if self.before else None


def _taken(others: Iterator[Record], room: int, count: Count) -> tuple[Record, ...]:
    taken: list[Record] = []
    while room > 0 and (record := next(others, None)):
        cut = record.cut(room, count)
        if cut is None:
            break
        taken.append(cut)
        room -= _size((cut,), count)
    return tuple(taken)


def _size(records: Sequence[Record], count: Count) -> int:
    """Tokens line by line, as `cut` counts them."""
    return sum(count("\n\n" + r.heading) + sum(count("\n" + line) for line in r.lines) for r in records)


def _trimmed(records: tuple[Record, ...]) -> tuple[Record, ...]:
    last = records[-1].shorter()
    return (*records[:-1], last) if last else records[:-1]
