"""Differences to the full cache as a view of the frontier: numbers, default range, what lies beyond.

Streams show nats a token, whose losses have no ceiling: one broken point would press all others onto the zero line.
So the default range ends above the bulk of the points, and what lies beyond is named and gets a place at the edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.frontier import GROUP
from harness.analysis.labels import mode
from harness.analysis.point_row import BASE
from harness.pages.figures import drawable
from harness.pages.hover import is_stream
from harness.pages.units import signed_small

_FENCE = 1.5  # interquartile ranges above the upper quartile: the whiskers of a box plot
_WORTH = 2.0  # points are only left beyond the range when that at least halves it
_PAD = 0.05  # of the range, above and below
_ROW = 0.045  # of the range: the height of one row of markers at the edge
_APART = 0.09  # of the width of a panel: a marker with its label
_NAMED = 8  # points a note names
_NOTE = (
    "Paired differences to the full cache on the same examples; bars are their 95 % intervals, the star and the dotted line "
    "at 0 are the full cache. Large, outlined points are on the frontier of the scores, as in the other view: a point there "
    "whose bar holds 0 is not shown to differ from the full cache, and bars do not compare two points with each other."
)
HOLLOW = " Hollow markers: simulated storage."


@dataclass(frozen=True)
class Paired:
    """The differences of a section; every series is indexed by the rows of the section's table.

    `low` and `high` are the ends of the default range, `edge` the height at which markers of points beyond it are.
    """

    title: str
    points: pd.DataFrame  # y, lo, hi; not finite where there is no difference; the full cache is 0 without an interval
    low: float
    high: float
    edge: pd.Series[float]


def of_section(section: pd.DataFrame) -> Paired | None:
    """The paired view of the points of one model and task; None where no drawable point has a difference."""
    points = _differences(section)
    stacks = section.loc[points.index, "stack"].to_numpy(dtype=object)
    known = points[np.isfinite(points["y"].to_numpy(dtype=np.float64)) & (stacks != BASE)]
    if known.empty:
        return None
    low, high = shown(known, cut=not section["higher_is_better"].iloc[0])
    pad = _PAD * (high - low or 1.0)
    low, high = low - pad, high + pad
    beyond = known.loc[known["y"] > high, "y"]
    panels = [section.loc[beyond.index.intersection(panel.index)] for _, panel in section.groupby(list(GROUP), sort=False)]
    width = _APART * min(len(panels), 2)
    rows = {
        index: row
        for panel in panels
        for index, row in _rows(beyond[panel.index], panel["bytes_context"], _limits(section), width)
    }
    step = _ROW * (high - low)
    high += step * (max(rows.values()) + 1) if rows else 0.0
    edge = {index: high - step * (row + 0.6) for index, row in rows.items() if beyond[index] > high}
    return Paired(_title(section), points, low, high, pd.Series(edge, dtype=float))


def shown(known: pd.DataFrame, *, cut: bool) -> tuple[float, float]:
    """(bottom, top) of the range that shows zero, the differences `y` and their intervals `lo`..`hi`.

    With `cut`, differences upwards are losses without a ceiling: those above the upper quartile by more than 1.5
    interquartile ranges (the full cache counts as one point at 0) and the ends of intervals as far out are left beyond
    the range, when that at least halves it. Nothing that is better than the full cache is ever left out.
    """
    y, low, high = (known[name].to_numpy(dtype=np.float64) for name in ("y", "lo", "hi"))
    whole = min(0.0, float(np.fmin(y, low).min())), max(0.0, float(np.fmax(y, high).max()))
    lower, upper = np.quantile(np.append(y, 0.0), [0.25, 0.75]).tolist()
    fence = upper + _FENCE * (upper - lower)
    kept = y <= fence
    if not cut or not kept.any():
        return whole
    top = max(0.0, float(np.fmax(y, np.minimum(high, fence))[kept].max()))
    bottom = min(0.0, float(y.min()), float(np.fmin(y, np.maximum(low, -fence))[kept].min()))
    return (bottom, top) if top > 0 and whole[1] - whole[0] >= _WORTH * (top - bottom) else whole


def note(section: pd.DataFrame, paired: Paired) -> str:
    """How to read the view, then which points lie beyond its default range and which have no difference, as HTML."""
    far = paired.points.loc[paired.edge.index, "y"].sort_values(ascending=False)
    beyond = [f"{_name(section.loc[index], section)} {signed_small(value)}" for index, value in far.items()]
    gone = section.loc[paired.points.index[~paired.points["y"].map(math.isfinite)]]
    without = [f"{_name(row, section)} ({row['diff_reason']})" for _, row in gone.iterrows()]
    lines = [_NOTE + (HOLLOW if (section["storage"] == "simulated").any() else "")]
    if beyond:
        words = f"{_count(beyond, 'lies', 'lie')} above the range"
        lines.append(f"<b>{words}</b> (↑ at its edge; double click shows all), {_unit(section)}: {_list(beyond)}")
    if without:
        words = f"{_count(without, 'has', 'have')} no paired difference"
        lines.append(f"<b>{words}</b> and no place in this view: {_list(without)}")
    return "<br>".join(lines)


def _differences(section: pd.DataFrame) -> pd.DataFrame:
    points = drawable(section)
    names = ("nll_diff", "nll_diff_lo", "nll_diff_hi") if _in_nats(section) else ("diff_to_full", "diff_lo", "diff_hi")
    table = points[list(names)].set_axis(["y", "lo", "hi"], axis=1).astype(float)
    table.loc[points["stack"] == BASE] = [0.0, math.nan, math.nan]
    return table


def _in_nats(section: pd.DataFrame) -> bool:
    return bool(section["nll_diff"].notna().any())


def _title(section: pd.DataFrame) -> str:
    first = section.iloc[0]
    better = "higher" if first["higher_is_better"] else "lower"
    if not _in_nats(section):
        return f"{first['metric']} minus that of the full cache ({better} is better)"
    return f"{_unit(section)} above the full cache (lower is better)"


def _unit(section: pd.DataFrame) -> str:
    first = section.iloc[0]
    log = "nats a token" if is_stream(first) else f"log of {first['metric']}"
    return log if _in_nats(section) else str(first["metric"])


def _limits(section: pd.DataFrame) -> tuple[float, float]:
    sizes = drawable(section)["bytes_context"]
    return float(sizes.min()), float(sizes.max())


def _rows(
    values: pd.Series[float], sizes: pd.Series[float], limits: tuple[float, float], apart: float
) -> list[tuple[int, int]]:
    """(index, row) of markers at these sizes: labels of neighbours do not meet on either axis; the largest is highest."""

    def places(size: float) -> tuple[float, float]:
        low, high = limits
        logs = [math.log(max(value, 1.0)) for value in (size, low, high)]
        return (logs[0] - logs[1]) / (logs[2] - logs[1] or 1.0), (size - low) / (high - low or 1.0)

    placed: list[tuple[int, int]] = []
    for index in values.sort_values(ascending=False).index:
        here = places(sizes[index])
        near = [row for other, row in placed if _meet(here, places(sizes[other]), apart)]
        placed.append((index, next(row for row in range(len(near) + 1) if row not in near)))
    return placed


def _meet(first: Sequence[float], second: Sequence[float], apart: float) -> bool:
    return any(abs(one - two) < apart for one, two in zip(first, second, strict=True))


def _name(row: pd.Series[Any], section: pd.DataFrame) -> str:
    several = section.groupby(list(GROUP)).ngroups > 1
    return f"{row['label']} ({mode(row)})" if several else str(row["label"])


def _count(names: list[str], one: str, many: str) -> str:
    return f"1 point {one}" if len(names) == 1 else f"{len(names)} points {many}"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
