"""Several tasks or models in one table: each run and mode keeps its own bytes, unit, interval and verdict; nothing is averaged.

The terminal and the page take their words and cells from here. Which tasks and models stand together, and which points are on
a joint frontier, is what the entries of frontier.json say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from harness.analysis.joint import OVER, Arm, arm_of
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.glossary import judged
from harness.pages.units import difference, share_text
from harness.pages.words.columns import ABOVE
from harness.pages.words.remarks import about_many, largest_peak, peaks_at
from harness.pages.words.verdicts import compared

Json = Mapping[str, Any]
_KEPT = 0.95  # of the full cache's score above chance, which is looked for where every smaller cache loses


class Cell(NamedTuple):
    """What it sorts by (None: its text), its text, and whether it is a verdict."""

    value: float | None
    text: str
    verdict: bool = False


class Panel(NamedTuple):
    """One task (or model) in one mode; `aware` is None where no question is asked, so that one run stands for both modes."""

    name: str
    aware: bool | None
    unit: str

    @property
    def title(self) -> str:
        """Its name, whether the question was seen, and the unit of its differences."""
        return f"{self.mode}; {self.unit}"

    @property
    def mode(self) -> str:
        """Its name and whether the question was seen while compressing."""
        words = {None: "no question asked, one run", True: "question seen", False: "question unseen"}
        return f"{self.name}, {words[self.aware]}"


@dataclass(frozen=True, kw_only=True)
class Together:
    """Runs side by side.

    Attributes:
        over: `tasks` of one model or `models` of one task; `common` is that model or task.
        panels: what stands side by side.
        arms: for each point its row in every panel that has it, by bytes.
        fronts: by the mode of an entry of frontier.json, the arms (see `arm_of`) on its joint frontier.
        means: the entries whose members all score shares, which have a mean.
    """

    over: str
    common: str
    panels: tuple[Panel, ...]
    arms: tuple[Mapping[Panel, Row], ...]
    fronts: Mapping[bool, frozenset[Arm]]
    means: tuple[Json, ...]

    @property
    def title(self) -> str:
        """Of what it is, and how much."""
        return f"{self.common} · {len(self.panels)} results together: {'; '.join(panel.mode for panel in self.panels)}"

    @property
    def complete(self) -> list[Mapping[Panel, Row]]:
        """The points that every panel ranked and that are smaller than the full cache in each."""
        whole = [arm for arm in self.arms if len(arm) == len(self.panels)]
        return [arm for arm in whole if all(pd.isna(row["left_out"]) and row["ratio"] < 1 for row in arm.values())]


def together(points: pd.DataFrame, entries: Iterable[Json]) -> list[Together]:
    """One for each model with several tasks and each task with several models, both modes in it.

    Points and entries are both as markup, or both not.
    """
    known: dict[tuple[str, str], list[Json]] = {}
    for entry in entries:
        known.setdefault((entry["over"], entry[OVER[entry["over"]]]), []).append(entry)
    return [_of(points, over, common, own) for (over, common), own in known.items()]


def _of(points: pd.DataFrame, over: str, common: str, entries: Sequence[Json]) -> Together:
    member = "task" if over == "tasks" else "model"
    table = points[(points[OVER[over]] == common) & (points["n"] > 0)]
    panels: dict[Panel, pd.DataFrame] = {}
    for entry in entries:
        for name in entry["members"]:
            rows = table[table[member] == name]
            for part, value in entry["runs"][name].items():  # of other runs nothing is ranked here
                rows = rows[rows[part] == value]
            asks = bool(rows["chunk"].isna().all())
            rows = rows[rows["query_aware"] == entry["query_aware"]] if asks else rows
            better = entry["better"][name]
            unit = f"{entry['units'][name]}, {better} is better"
            panels.setdefault(Panel(name, bool(entry["query_aware"]) if asks else None, unit), rows)
    names = list(dict.fromkeys(panel.name for panel in panels))
    order = sorted(panels, key=lambda panel: (panel.aware is None, names.index(panel.name), bool(panel.aware)))
    arms: dict[Arm, dict[Panel, Row]] = {}
    for panel in order:
        for row in rows_of(panels[panel]):
            arms.setdefault(arm_of(row), {})[panel] = row
    return Together(
        over=over,
        common=common,
        panels=tuple(order),
        arms=tuple(sorted(arms.values(), key=_size)),
        fronts={bool(one["query_aware"]): frozenset(arm_of(p) for p in one["points"] if p["on_frontier"]) for one in entries},
        means=tuple(entry for entry in entries if entry["points"][0]["score"] is not None),
    )


def _size(arm: Mapping[Panel, Row]) -> float:
    """What arms are sorted by: the mean of the logarithms of their shares of bytes."""
    shares = [row["ratio"] for row in arm.values() if row["ratio"] > 0]
    return sum(map(math.log, shares)) / len(shares) if shares else math.inf


def headline(found: Together) -> str:
    """The smallest point that loses nowhere, with what each result leaves open; else that there is none."""
    smaller = found.complete
    if not smaller:
        return "No smaller cache has a score on all of them"
    unharmed = [arm for arm in smaller if all(compared(row).harmless for row in arm.values())]
    if not unharmed:
        return f"Every smaller cache does worse, or may, on at least one of them{_kept(found)}"
    best = unharmed[0]  # by bytes
    parts = "; ".join(f"{_called(panel)} {share_text(row['ratio'])} of the bytes, {judged(row)}" for panel, row in best.items())
    peaks = peaks_at(best.values())
    over = f". It {peaks}" if peaks else ""
    return f"{_label(best)} is the smallest that is worse on none of them: {parts}{_settled(best)}{over}"


def _settled(arm: Mapping[Panel, Row]) -> str:
    """How many documents would settle what is open."""
    open_ = [f"{_called(panel)} {needed}" for panel, row in arm.items() if (needed := about_many(row))]
    return f". Documents that would settle what is open: {', '.join(open_)}" if open_ else ""


def _kept(found: Together) -> str:
    """Where scores have a mean: the smallest that keeps most of it, mode by mode; else nothing."""
    said = []
    for entry in found.means:
        near = [point for point in entry["points"] if point["ratio"] < 1 and point["score"] >= _KEPT]
        mode = {True: "question seen", False: "question unseen"}[bool(entry["query_aware"])]
        best = min(near, key=lambda point: point["ratio"], default=None)
        share = f"{share_text(_KEPT)} of the score above chance on average"
        said.append(
            f"; {mode}, {best['label']} is the smallest that keeps {share}" if best else f"; {mode}, none keeps {share}"
        )
    return "".join(said)


def _called(panel: Panel) -> str:
    mode = {None: "", True: " (question seen)", False: " (unseen)"}
    return f"{panel.name}{mode[panel.aware]}"


def arm_key(arm: Mapping[Panel, Row]) -> Arm:
    """What an arm has in common in all panels; a label may be another one in each."""
    return arm_of(next(iter(arm.values())))


def _label(arm: Mapping[Panel, Row]) -> str:
    """What the first panel calls the point."""
    return str(next(iter(arm.values()))["label"])


def columns(found: Together) -> list[tuple[str, str]]:
    """(what a column is of, its head), in the order of `cells`; what concerns all is of nothing."""
    own = [(panel.title, head) for panel in found.panels for head in ("of full", "verdict", "vs full", "95 % paired")]
    fronts = [("", f"frontier{_of_mode(aware, found)}") for aware in found.fronts]
    return [("", "stack and point"), ("", "peak incl. prefill"), *own, *fronts]


def _of_mode(aware: bool, found: Together) -> str:
    return "" if len(found.fronts) < 2 else ", question seen" if aware else ", question unseen"


def cells(found: Together) -> list[list[Cell]]:
    """For each point its cells; a panel that lacks the point has dashes."""
    return [
        [
            Cell(None, _label(arm)),
            _peak(arm),
            *(cell for panel in found.panels for cell in _cells(arm.get(panel))),
            *(Cell(None, "●" if arm_key(arm) in front else "") for front in found.fronts.values()),
        ]
        for arm in found.arms
    ]


def _cells(row: Row | None) -> list[Cell]:
    if row is None:
        return [Cell(math.nan, "–"), Cell(None, "not run"), Cell(math.nan, "–"), Cell(None, "")]
    share = Cell(row["ratio"], share_text(row["ratio"]))
    if row["stack"] == BASE:
        return [share, Cell(None, "base", verdict=True), Cell(math.nan, ""), Cell(None, "")]
    told = compared(row)
    value, _, within = difference(row).text.partition(" ")
    return [share, Cell(None, judged(row), verdict=True), Cell(told.value, value), Cell(None, within)]


def _peak(arm: Mapping[Panel, Row]) -> Cell:
    """The largest share of the full cache's peak that the point takes anywhere."""
    most = largest_peak(arm.values())
    return Cell(most, f"{share_text(most)}{f' {ABOVE}' if most > 1 else ''}")


def printed(found: Together) -> list[dict[str, str]]:
    """The rows of a terminal's table: a column a panel, with bytes and verdict; intervals are in its own table."""
    return [
        {
            "stack and point": _label(arm),
            **{_called(panel): _short(arm.get(panel)) for panel in found.panels},
            "peak": _peak(arm).text,
        }
        for arm in found.arms
    ]


def _short(row: Row | None) -> str:
    if row is None:
        return "not run"
    return f"{share_text(row['ratio'])} {'base' if row['stack'] == BASE else judged(row)}"
