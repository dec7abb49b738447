"""`limit=auto`: documents are asked for in rounds, until every arm is resolved or there are no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.analysis.sequences import Floats, sequence
from harness.configure.arms import FULL
from harness.errors import UserError
from harness.evaluation.planned import Planned
from harness.files.digests import place
from harness.files.json_values import Json
from harness.records.schema import FINAL
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

    Units are documents (`group_id`), in a random order that scores do not decide. An arm is asked on every unit until it is
    resolved; the full cache is on all that any arm needs.

    Attributes:
        took: units that each resolved arm needed, by its name.
        left: arms that are not resolved.
    """

    planned: Sequence[Planned]
    store: Store[Planned]
    precision: float
    took: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Planned]]:
        units = self._units()
        self.left = list(dict.fromkeys(one.arm.name for one in self.planned if one.arm.label != FULL))
        before = 0
        for n in rounds(len(units)):
            wanted = {FULL, *self.left}
            yield [one for unit in units[before:n] for one in unit if {one.arm.label, one.arm.name} & wanted]
            before = n
            self._resolve(units[:n])
            if not self.left:
                return

    def _units(self) -> list[list[Planned]]:
        """The records of each unit, in the order in which units are asked for."""
        found: dict[str, list[Planned]] = {}
        for one in self.planned:
            found.setdefault(place(one.seed, one.example.group_id or one.example.id), []).append(one)
        return [found[name] for name in sorted(found)]

    def _resolve(self, units: Sequence[Sequence[Planned]]) -> None:
        """Take out the arms that these units resolve."""
        scores = {record["key"]: _score(record) for record in self.store.records() if record["status"] in FINAL}
        for name in list(self.left):
            differences = [mean for unit in units if (mean := _difference(unit, name, scores)) is not None]
            if resolved(np.array(differences), self.precision):
                self.took[name] = len(differences)
                self.left.remove(name)


def _difference(unit: Sequence[Planned], name: str, scores: Mapping[str, float | None]) -> float | None:
    """Mean of arm - full over the questions of a unit that both were scored on."""
    full = {one.example.id: scores.get(one.key) for one in unit if one.arm.label == FULL}
    pairs = [(scores.get(one.key), full.get(one.example.id)) for one in unit if one.arm.name == name]
    known = [arm - whole for arm, whole in pairs if arm is not None and whole is not None]
    return float(np.mean(known)) if known else None


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
