"""Titles of panels and axes, and the byte breakdown, from ranked tables and looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from harness.analysis.labels import mode
from harness.pages.hover import is_stream
from harness.pages.looks import AXIS, KIND_LOOKS, Look, layout
from harness.pages.units import iec
from harness.types import BYTE_KINDS

_X_TITLES = {"bytes": "KV bytes of one sample, allocated", "ratio": "KV bytes as a share of the full cache"}
_STREAM_X_TITLES = {
    "bytes": "time mean of the KV bytes held while a document streams, allocated",
    "ratio": "time mean of the KV bytes as a share of that of the full cache",
}
_STREAM_END = "KV bytes held at the end of the stream, allocated"
_BARS = 60  # bars a page shows at a time


def x_titles(section: pd.DataFrame) -> dict[str, str]:
    """Titles of the byte axis by unit; for streams it is the time mean."""
    return _STREAM_X_TITLES if is_stream(section.iloc[0]) else _X_TITLES


def panel_title(panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """The mode, with what the question's part was; the run too where two runs share a mode."""
    row = panel.iloc[0]
    what = "question seen while compressing" if row["query_aware"] else "question unseen while compressing"
    if is_stream(row):
        what = f"documents read in chunks of {row['chunk']:.0f} tokens"
    same = section[section["query_aware"] == row["query_aware"]]["run_id"].nunique()
    return f"<b>{mode(row)}</b>: {what}" + (f" · {row['run_id']}" if same > 1 else "")


def short(column: pd.Series[Any]) -> list[float | None]:
    """Six digits, as much as a screen can show; nothing where there is no number."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in column]


def drawable(points: pd.DataFrame) -> pd.DataFrame:
    """The points that have a place on linear axes."""
    finite = points["score"].map(math.isfinite) & points["bytes_context"].map(math.isfinite)
    return points[finite].sort_values(["bytes_context", "score"])


def breakdown(panel: pd.DataFrame, looks: Mapping[str, Look]) -> tuple[go.Figure, dict[str, tuple[int, int]]]:
    """(figure, windows by name): allocated bytes by kind, one stacked bar a point, the fewest bytes on top.

    The stack's own marker is at the logical bytes. A window is the bars a page shows at a time, as a slice of all;
    the first one holds the fewest bytes.
    """
    points = panel[panel["bytes_context"].map(math.isfinite)].sort_values(["bytes_context", "label"], ascending=False)
    labels, names = points["short"].tolist(), points["label"].tolist()
    figure = go.Figure()
    for kind in BYTE_KINDS:
        values = points[f"allocated_{kind}"].fillna(0)
        if not values.any():
            continue
        colour, pattern = KIND_LOOKS[kind]
        shape = {"shape": pattern, "fgcolor": "white", "bgcolor": colour, "size": 6, "solidity": 0.25}
        said = f"<b>%{{text}}</b><br>{kind} %{{customdata}}<extra></extra>"  # the page writes its bytes there
        bar = {"orientation": "h", "marker": {"color": colour, "pattern": shape}, "name": kind}
        figure.add_bar(x=short(values), y=labels, text=names, textposition="none", hovertemplate=said, **bar)
    windows = _windows(points)
    shown = min(len(labels), _BARS)
    styles = [looks[stack] for stack in points["stack"]]
    figure.add_scatter(
        x=short(points["bytes_logical"]),
        y=labels,
        mode="markers",
        name="logical bytes (the stack's marker)",
        marker={
            "symbol": [look.marker(storage) for look, storage in zip(styles, points["storage"], strict=True)],
            "color": [look.colour for look in styles],
            "size": 9,
            "line": {"color": "white", "width": 1},
        },
        customdata=points["about"].tolist(),
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_layout(
        layout(
            barmode="stack",
            bargap=0.28,
            height=120 + 21 * shown,
            legend={
                "orientation": "h",
                "y": 0.995,
                "yref": "container",
                "yanchor": "top",
                "x": 0,
                "traceorder": "normal",
            },
            margin={"l": 64, "r": 24, "t": 96, "b": 12},
        )
    )
    title = _STREAM_END if is_stream(panel.iloc[0]) else _X_TITLES["bytes"]
    figure.update_xaxes(**AXIS, side="top", title={"text": title, "font": {"size": 13}})
    figure.update_yaxes(automargin=True, ticks="", showgrid=False, type="category", range=[-0.7, shown - 0.3])
    return figure, windows


def _windows(points: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """Slices of at most _BARS bars, counted from the last one, which has the fewest bytes."""
    sizes, n = points["bytes_context"].tolist(), len(points)
    found = {}
    for first in range(0, n, _BARS):
        last = min(first + _BARS, n)
        span = f"{iec(sizes[n - 1 - first])} to {iec(sizes[n - last])}"
        found[f"{first + 1}–{last} of {n:,}: {span}"] = (n - last, n - first)
    return found
