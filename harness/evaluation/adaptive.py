"""`limit=auto`: documents are asked for in rounds, until every arm is resolved or there are no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.analysis.clusters import paired
from harness.analysis.sequences import Floats, sequence
from harness.configure.arms import FULL
from harness.errors import UserError
from harness.evaluation.planned import Planned
from harness.files.digests import place
from harness.files.json_values import Json
from harness.records.schema import FINAL
from harness.records.shards import Standing, standing
from harness.records.store import Store

FIRST = 12  # units of the first round
GROWTH = 1.25  # of the number of units, from round to round


def rounds(most: int) -> list[int]:
    """How many units there are after each round, up to all of them."""
    found = [min(FIRST, most)]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * GROWTH))))
    return found


def resolved(differences: Floats, precision: float) -> bool:
    """Whether the interval of a paired difference in [-1, 1] excludes 0, or reaches at most `precision` to either side.

    The interval holds at every number of units, so it may be looked at after each round.
    """
    found = sequence(differences, -1.0, 1.0)
    return 0.0 not in found or found.half_width <= precision


@dataclass
class Adaptive:
    """What to ask next, from what was answered: iterate, and make each round's records before the next is asked for.

    Units are documents (`group_id`), whatever the seeds of their questions, in a random order that scores do not decide. An arm
    is asked on every unit until it is resolved; the full cache is on all that any arm needs. An arm that no unit has said
    anything of, as all its records failed or were refused, goes along while others go on, and keeps no round going by itself.

    Attributes:
        took: units that each resolved arm needed, by its name.
        left: arms that are not resolved.
    """

    planned: Sequence[Planned]
    store: Store[Planned]
    precision: float
    took: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    _scores: dict[str, tuple[Standing, float | None]] = field(default_factory=dict)  # of records with a final status, by key

    def __iter__(self) -> Iterator[list[Planned]]:
        units = self._units()
        self.left = list(dict.fromkeys(one.arm.name for one in self.planned if one.arm.label != FULL))
        before = 0
        for n in rounds(len(units)):
            wanted = {FULL, *self.left}
            yield [one for unit in units[before:n] for one in unit if {one.arm.label, one.arm.name} & wanted]
            before = n
            if not self._resolve(units[:n]):
                return

    def _units(self) -> list[list[Planned]]:
        """The records of each unit, in the order in which units are asked for."""
        found: dict[str, list[Planned]] = {}
        for one in self.planned:
            found.setdefault(_place(one), []).append(one)
        return [found[name] for name in sorted(found)]

    def _resolve(self, units: Sequence[Sequence[Planned]]) -> bool:
        """Take out the arms that these units resolve; whether more units could resolve one of those that are left."""
        self._take_in()
        hope = False
        for name in list(self.left):
            differences = paired(pair for unit in units for pair in self._pairs(unit, name)).differences
            if resolved(differences, self.precision):
                self.took[name] = len(differences)
                self.left.remove(name)
            else:
                hope = hope or len(differences) > 0
        return hope

    def _take_in(self) -> None:
        """Note the scores that were written since the round before: no record is read twice."""
        for record in self.store.fresh():
            rank = standing(record)
            if record["status"] in FINAL and rank >= self._scores.get(record["key"], (rank, None))[0]:
                self._scores[record["key"]] = rank, _score(record)

    def _pairs(self, unit: Sequence[Planned], name: str) -> Iterator[tuple[str, float, float]]:
        """(unit, score of the arm, score of the full cache) of every question of a unit that both were scored on."""
        score = {one.key: self._scores[one.key][1] for one in unit if one.key in self._scores}
        full = {(one.seed, one.example.id): score.get(one.key) for one in unit if one.arm.label == FULL}
        for one in unit:
            arm, whole = score.get(one.key), full.get((one.seed, one.example.id))
            if one.arm.name == name and arm is not None and whole is not None:
                yield _place(one), arm, whole


def _place(one: Planned) -> str:
    """Where the unit of a record stands in the order in which units are asked for."""
    return place(one.example.group_id or one.example.id)


def _score(record: Json) -> float | None:
    """A record's score; UserError where it is not a share, so that differences have no limits."""
    score = record["score"]
    if score is None:
        return None
    if record["aggregate"] != "mean" or not record["higher_is_better"] or not 0 <= score <= 1:
        raise UserError(
            f"limit=auto is not possible with metric {record['metric']!r}: it needs scores from 0 to 1, of which more is "
            "better; give a number of examples"
        )
    return float(score)
