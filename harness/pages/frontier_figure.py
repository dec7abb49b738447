"""Score, or paired difference to the full cache, against bytes, from ranked tables and looks.

The figure is made in the view of scores. What the page can switch travels along: bytes or share of the full cache and the
paired view of a trace in its `meta`, axes and lines of both views beside the figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.analysis.frontier import GROUP
from harness.analysis.point_row import BASE
from harness.pages.figures import drawable, panel_title, short, x_titles
from harness.pages.looks import AXIS, FRONTIER_RANK, INK, MUTED, Look, layout, legend, legend_height
from harness.pages.paired_view import Paired
from harness.pages.units import signed_small

_PANEL_HEIGHT = 500
_MARGIN = {"l": 64, "r": 16, "t": 44, "b": 60}
CROWDED = 150  # points of a panel, from which only those on the frontier keep their bars and size, and piles are not counted


def frontier(section: pd.DataFrame, looks: Mapping[str, Look], paired: Paired | None = None) -> go.Figure:
    """Score against bytes, one panel per run and mode; a panel's frontier is a step line, beaten points are lighter."""
    panels = [group for _, group in section.groupby(list(GROUP), sort=False)]
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    titles = [panel_title(panel, section) for panel in panels]
    grid = {"horizontal_spacing": 0.05, "vertical_spacing": 0.22 / rows}
    places: list[dict[str, Any] | None] = [
        {} if i < len(panels) else None for i in range(rows * columns)
    ]  # no axes where there is no panel
    specs = [places[start : start + columns] for start in range(0, len(places), columns)]
    figure = make_subplots(rows=rows, cols=columns, specs=specs, shared_yaxes="all", subplot_titles=titles, **grid)
    named: set[str] = set()
    for i, panel in enumerate(panels):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        _reference(figure, panel, where)
        _add(figure, _frontier_trace(panel, paired, first=i == 0), where)
        crowded = len(panel) > CROWDED
        for stack, points in panel.groupby("stack", sort=True):
            _add(figure, _stack_trace(points, looks[str(stack)], paired, first=stack not in named, crowded=crowded), where)
            _add(figure, _edge_trace(points, looks[str(stack)], paired), where)
            named.add(str(stack))
    first = section.iloc[0]
    arrow = "higher" if first["higher_is_better"] else "lower"
    height = legend_height(len(named) + 1, _PANEL_HEIGHT * rows, _MARGIN)
    figure.update_layout(layout(height=height, legend=legend("togglegroup"), margin=_MARGIN))
    figure.update_xaxes(**AXIS, type="log", title={"text": x_titles(section)["bytes"], "font": {"size": 13}})
    figure.update_yaxes(**AXIS)
    figure.update_yaxes(title={"text": f"{first['metric']} ({arrow} is better)", "font": {"size": 13}}, col=1)
    if first["higher_is_better"] and section["score_hi"].max() <= 1:
        figure.update_yaxes(range=[-0.03, 1.04])
    elif not first["higher_is_better"]:
        figure.update_yaxes(type="log")
    figure.update_annotations(font={"size": 14, "color": INK})
    return figure


def views(figure: go.Figure, paired: Paired) -> dict[str, dict[str, Any]]:
    """Title, type and range of the score axis, and the lines across a panel, by view; a range of None is automatic."""
    axis = figure.layout.yaxis
    shapes = [shape.to_plotly_json() for shape in figure.layout.shapes]
    zero = [{**shape, "y0": 0, "y1": 0} for shape in shapes if shape["type"] == "line"]
    chosen = list(axis.range) if axis.range else None
    return {
        "score": {"title": axis.title.text, "type": axis.type or "linear", "range": chosen, "shapes": shapes},
        "paired": {"title": paired.title, "type": "linear", "range": [paired.low, paired.high], "shapes": zero},
    }


def _add(figure: go.Figure, trace: Any, where: dict[str, int]) -> None:
    if trace is not None:
        figure.add_trace(trace, **where)


def _stack_trace(points: pd.DataFrame, look: Look, paired: Paired | None, *, first: bool, crowded: bool) -> go.Scatter | None:
    points = drawable(points)
    if points.empty:
        return None
    stack = points["stack"].iloc[0]
    bold = _bold(points) if crowded else pd.Series(True, index=points.index)
    return go.Scatter(
        x=short(points["bytes_context"]),
        y=short(points["score"]),
        name=points["short_stack"].iloc[0],
        legendgroup=stack,
        legendrank=look.rank,
        showlegend=first,
        mode="lines+markers",
        cliponaxis=False,
        line={"color": look.faded(0.08 if crowded else 0.3), "width": 1.2, "dash": look.dash},
        marker=_marker(points, look, crowded=crowded),
        error_y={"type": "data", "symmetric": False, "width": 0}
        | _bars(points[["score", "score_lo", "score_hi"]], bold, thickness=1, color=look.faded(0.4)),
        customdata=points["hover"].tolist(),
        hovertemplate="%{customdata}<extra></extra>",
        meta=_sizes(points) | _in_pairs(points, paired, bold, look) | _names(points),
    )


def _names(points: pd.DataFrame) -> dict[str, Any]:
    """The points that the page names in the figure, where there is room, by their place; whether they are the full cache."""
    named = {i: name for i, (name, on) in enumerate(zip(points["short"], _bold(points), strict=True)) if on}
    return {"labels": named, **({"base": True} if points["stack"].iloc[0] == BASE else {})}


def _bold(points: pd.DataFrame) -> pd.Series[bool]:
    return points["on_frontier"] | (points["stack"] == BASE)


def _marker(points: pd.DataFrame, look: Look, *, crowded: bool = False) -> dict[str, Any]:
    bold = _bold(points).tolist()
    size, opacity = (6, 0.35) if crowded else (9, 0.6)
    return {
        "symbol": [look.marker(storage) for storage in points["storage"]],
        "color": look.colour,
        "size": [13 if on else size for on in bold] if points["stack"].iloc[0] != BASE else 15,
        "opacity": [1.0 if on else opacity for on in bold],
        "line": {"width": [1.3 if on else 0.6 for on in points["on_frontier"]], "color": INK},
    }


def _bars(table: pd.DataFrame, shown: pd.Series[bool], **style: Any) -> dict[str, Any]:
    """Ends of the intervals of a table of (value, low end, high end); none where there is no interval or it is not shown."""
    y, low, high = (table[name].where(shown) for name in table.columns)
    return {"array": short((high - y).fillna(0)), "arrayminus": short((y - low).fillna(0)), **style}


def _in_pairs(
    points: pd.DataFrame, paired: Paired | None, shown: pd.Series[bool] | None = None, look: Look | None = None
) -> dict[str, Any]:
    """What a trace shows in the paired view, with bars where it has a look; they are what that view is for, so not faint."""
    if paired is None:
        return {}
    own = paired.points.loc[points.index]
    bars = {"bars": _bars(own, shown, thickness=1.6, color=look.faded(0.8))} if look and shown is not None else {}
    return {"paired": {"y": short(own["y"]), **bars}}


def _sizes(points: pd.DataFrame) -> dict[str, Any]:
    """The two units of the byte axis, and which points these are."""
    return {"bytes": short(points["bytes_context"]), "ratio": short(points["ratio"]), "ids": points["id"].tolist()}


def _edge_trace(points: pd.DataFrame, look: Look, paired: Paired | None) -> go.Scatter | None:
    """Markers at the edge for what lies beyond the default range of the paired view; they are nowhere in the other."""
    if paired is None:
        return None
    beyond = points.loc[points.index.intersection(paired.edge.index)]
    if beyond.empty:
        return None
    stack = beyond["stack"].iloc[0]
    return go.Scatter(
        x=short(beyond["bytes_context"]),
        y=[None] * len(beyond),
        name=beyond["short_stack"].iloc[0],
        legendgroup=stack,
        showlegend=False,
        mode="markers+text",
        cliponaxis=False,
        marker=_marker(beyond, look),
        text=[f" ↑ {signed_small(value)}" for value in paired.points.loc[beyond.index, "y"]],
        textposition="middle right",
        textfont={"size": 11, "color": INK},
        customdata=beyond["hover"].tolist(),
        hovertemplate="%{customdata}<extra></extra>",
        meta=_sizes(beyond) | {"paired": {"y": short(paired.edge[beyond.index])}, "edge": True},
    )


def _frontier_trace(panel: pd.DataFrame, paired: Paired | None, *, first: bool) -> go.Scatter | None:
    front = panel[panel["on_frontier"]].sort_values(["bytes_context", "score"])
    if front.empty:
        return None
    return go.Scatter(
        x=short(front["bytes_context"]),
        y=short(front["score"]),
        name="frontier",
        legendgroup="frontier",
        legendrank=FRONTIER_RANK,
        connectgaps=True,
        showlegend=first,
        mode="lines",
        line={"color": INK, "width": 2, "shape": "hv"},
        hoverinfo="skip",
        meta=_sizes(front) | _in_pairs(front, paired),
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
