"""The frontier and the byte breakdown of a page, from ranked tables and looks; it knows no record and no HTML.

Quantities that the page can switch (bytes or share of the full cache) travel in each trace's `meta`.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.run.dashboard_style import AXIS, INK, KIND_LOOKS, MUTED, Look, layout
from harness.run.dashboard_text import hover, is_stream, mode
from harness.run.pareto import GROUP
from harness.run.point_row import BASE
from harness.run.units import iec
from harness.types import BYTE_KINDS

_X_TITLES = {"bytes": "KV bytes of one sample, allocated", "ratio": "KV bytes as a share of the full cache"}
_STREAM_X_TITLES = {
    "bytes": "time mean of the KV bytes held while a document streams, allocated",
    "ratio": "time mean of the KV bytes as a share of that of the full cache",
}
_STREAM_END = "KV bytes held at the end of the stream, allocated"
_PANEL_HEIGHT = 500


def frontier(section: pd.DataFrame, looks: dict[str, Look]) -> go.Figure:
    """Score against bytes, one panel per run and mode; a panel's frontier is a step line, beaten points are lighter."""
    panels = [group for _, group in section.groupby(list(GROUP), sort=False)]
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    titles = [panel_title(panel, section) for panel in panels]
    grid = {"horizontal_spacing": 0.05, "vertical_spacing": 0.22 / rows}
    figure = make_subplots(rows=rows, cols=columns, shared_yaxes="all", subplot_titles=titles, **grid)
    named: set[str] = set()
    for i, panel in enumerate(panels):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        _reference(figure, panel, where)
        for stack, points in panel.groupby("stack", sort=True):
            _add(figure, _stack_trace(points, looks[str(stack)], first=stack not in named), where)
            named.add(str(stack))
        _add(figure, _frontier_trace(panel, first=i == 0), where)
    first = section.iloc[0]
    arrow = "higher" if first["higher_is_better"] else "lower"
    figure.update_layout(layout(height=_PANEL_HEIGHT * rows, legend=_legend(), margin={"l": 64, "r": 16, "t": 44, "b": 60}))
    figure.update_xaxes(**AXIS, type="log", title={"text": x_titles(section)["bytes"], "font": {"size": 13}})
    figure.update_yaxes(**AXIS)
    figure.update_yaxes(title={"text": f"{first['metric']} ({arrow} is better)", "font": {"size": 13}}, col=1)
    if first["higher_is_better"] and section["score_hi"].max() <= 1:
        figure.update_yaxes(range=[-0.03, 1.04])
    elif not first["higher_is_better"]:
        figure.update_yaxes(type="log")
    figure.update_annotations(font={"size": 14, "color": INK})
    return figure


def x_titles(section: pd.DataFrame) -> dict[str, str]:
    """Titles of the byte axis by unit; for streams it is the time mean."""
    return _STREAM_X_TITLES if is_stream(section.iloc[0]) else _X_TITLES


def panel_title(panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """The mode, with what the question's part was; the run too where two runs share a mode."""
    row = panel.iloc[0]
    told = "question seen while compressing" if row["query_aware"] else "question unseen while compressing"
    if is_stream(row):
        told = f"documents read in chunks of {row['chunk']:.0f} tokens"
    same = section[section["query_aware"] == row["query_aware"]]["run_id"].nunique()
    return f"<b>{mode(row)}</b>: {told}" + (f" · {row['run_id']}" if same > 1 else "")


def _add(figure: go.Figure, trace: Any, where: dict[str, int]) -> None:
    if trace is not None:
        figure.add_trace(trace, **where)


def _legend() -> dict[str, Any]:
    return {"groupclick": "togglegroup", "itemsizing": "constant", "font": {"size": 12}, "tracegroupgap": 2}


def drawable(points: pd.DataFrame) -> pd.DataFrame:
    """The points that have a place on linear axes."""
    finite = points["score"].map(math.isfinite) & points["bytes_context"].map(math.isfinite)
    return points[finite].sort_values(["bytes_context", "score"])


def _stack_trace(points: pd.DataFrame, look: Look, *, first: bool) -> go.Scatter | None:
    points = drawable(points)
    if points.empty:
        return None
    front = points["on_frontier"].tolist()
    stack = points["stack"].iloc[0]
    return go.Scatter(
        x=points["bytes_context"].tolist(),
        y=points["score"].tolist(),
        name=stack,
        legendgroup=stack,
        showlegend=first,
        mode="lines+markers",
        cliponaxis=False,
        line={"color": look.faded(0.3), "width": 1.2, "dash": look.dash},
        marker={
            "symbol": [look.marker(storage) for storage in points["storage"]],
            "color": look.colour,
            "size": [13 if on else 9 for on in front] if stack != BASE else 15,
            "opacity": [1.0 if on or stack == BASE else 0.6 for on in front],
            "line": {"width": [1.3 if on else 0.6 for on in front], "color": INK},
        },
        error_y={
            "type": "data",
            "symmetric": False,
            "array": (points["score_hi"] - points["score"]).fillna(0).tolist(),
            "arrayminus": (points["score"] - points["score_lo"]).fillna(0).tolist(),
            "thickness": 1,
            "width": 0,
            "color": look.faded(0.4),
        },
        customdata=[hover(row) for _, row in points.iterrows()],
        hovertemplate="%{customdata}<extra></extra>",
        meta={"bytes": points["bytes_context"].tolist(), "ratio": _or_none(points["ratio"])},
    )


def _frontier_trace(panel: pd.DataFrame, *, first: bool) -> go.Scatter | None:
    front = panel[panel["on_frontier"]].sort_values(["bytes_context", "score"])
    if front.empty:
        return None
    return go.Scatter(
        x=front["bytes_context"].tolist(),
        y=front["score"].tolist(),
        name="frontier",
        legendgroup="frontier",
        showlegend=first,
        mode="lines",
        line={"color": INK, "width": 2, "shape": "hv"},
        hoverinfo="skip",
        meta={"bytes": front["bytes_context"].tolist(), "ratio": _or_none(front["ratio"])},
    )


def _reference(figure: go.Figure, panel: pd.DataFrame, where: dict[str, int]) -> None:
    """The full cache as a line across the panel with its interval as a band."""
    base = panel[(panel["stack"] == BASE) & panel["score"].map(math.isfinite)]
    if base.empty:
        return
    row = base.iloc[0]
    if math.isfinite(row["score_hi"] - row["score_lo"]):
        band = {"y0": row["score_lo"], "y1": row["score_hi"], "fillcolor": INK, "opacity": 0.07, "line_width": 0}
        figure.add_hrect(**band, layer="below", exclude_empty_subplots=False, **where)
    line = {"color": MUTED, "width": 1.2, "dash": "dot"}
    figure.add_hline(y=row["score"], line=line, layer="below", exclude_empty_subplots=False, **where)


def _or_none(column: pd.Series[Any]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in column]


def breakdown(panel: pd.DataFrame, looks: dict[str, Look]) -> go.Figure:
    """Allocated bytes by kind, one stacked bar a point; the stack's own marker stands at the logical bytes."""
    points = panel[panel["bytes_context"].map(math.isfinite)].sort_values(["bytes_context", "label"], ascending=False)
    labels = points["label"].tolist()
    figure = go.Figure()
    for kind in BYTE_KINDS:
        values = points[f"allocated_{kind}"].fillna(0)
        if not values.any():
            continue
        colour, pattern = KIND_LOOKS[kind]
        text = [f"<b>{name}</b><br>{kind} {iec(value)}" for name, value in zip(labels, values, strict=True)]
        shape = {"shape": pattern, "fgcolor": "white", "bgcolor": colour, "size": 6, "solidity": 0.25}
        bar = {"orientation": "h", "marker": {"color": colour, "pattern": shape}, "name": kind}
        figure.add_bar(x=values.tolist(), y=labels, customdata=text, hovertemplate="%{customdata}<extra></extra>", **bar)
    styles = [looks[stack] for stack in points["stack"]]
    figure.add_scatter(
        x=points["bytes_logical"].tolist(),
        y=labels,
        mode="markers",
        name="logical bytes (the stack's marker)",
        marker={
            "symbol": [look.marker(storage) for look, storage in zip(styles, points["storage"], strict=True)],
            "color": [look.colour for look in styles],
            "size": 9,
            "line": {"color": "white", "width": 1},
        },
        customdata=[hover(row) for _, row in points.iterrows()],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_layout(
        layout(
            barmode="stack",
            bargap=0.28,
            height=120 + 21 * len(labels),
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
    figure.update_yaxes(automargin=True, ticks="", showgrid=False, type="category", range=[-0.7, len(labels) - 0.3])
    return figure
