"""The needle heat map of a page, length across and depth down, from a table of cells; it writes no HTML."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.run.dashboard_style import INK, layout
from harness.run.point_row import BASE
from harness.run.units import iec, interval_text, score_text


def heat(cells: pd.DataFrame, chosen: str) -> tuple[go.Figure, dict[str, dict[str, Any]]]:
    """(figure, content by label): full cache left, the chosen point right, length across and depth down."""
    lengths, depths = sorted(cells["length"].unique()), sorted(cells["depth"].unique())
    content = {str(label): _matrix(part, lengths, depths) for label, part in cells.groupby("label", sort=False)}
    shown = [BASE if BASE in content else chosen, chosen]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=shown)
    bounded = cells["score"].between(0, 1).all()
    limits = (0.0, 1.0) if bounded else (cells["score"].min(), cells["score"].max())
    for column, label in enumerate(shown, start=1):
        trace = go.Heatmap(
            **content[label],
            x=[f"{length:,.0f}" for length in lengths],
            y=[f"{depth:.0%}" for depth in depths],
            texttemplate="%{text}",
            hovertemplate="%{customdata}<extra></extra>",
            colorscale="Cividis",
            zmin=limits[0],
            zmax=limits[1],
            xgap=3,
            ygap=3,
            colorbar={
                "title": {"text": cells["metric"].iloc[0], "font": {"size": 13}},
                "thickness": 12,
                "outlinewidth": 0,
            },
            showscale=column == 2,
        )
        figure.add_trace(trace, row=1, col=column)
    figure.update_layout(layout(height=140 + 46 * len(depths)))
    figure.update_annotations(font={"size": 14, "color": INK})
    figure.update_xaxes(title={"text": "length in tokens", "font": {"size": 13}}, type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_yaxes(title={"text": "depth of the needle", "font": {"size": 13}}, col=1)
    return figure, content


def _matrix(part: pd.DataFrame, lengths: list[float], depths: list[float]) -> dict[str, Any]:
    rows = {(row["length"], row["depth"]): row for _, row in part.iterrows()}
    grid = [[rows.get((length, depth)) for length in lengths] for depth in depths]
    return {
        "z": [[None if c is None or not math.isfinite(c["score"]) else c["score"] for c in line] for line in grid],
        "text": [["" if c is None else score_text(c["score"]) + _mark(c) for c in line] for line in grid],
        "customdata": [["not run" if c is None else _cell_hover(c) for c in line] for line in grid],
    }


def _mark(cell: pd.Series[Any]) -> str:
    return " †" if pd.notna(cell["discriminative"]) and not cell["discriminative"] else ""


def _cell_hover(cell: pd.Series[Any]) -> str:
    score = f"{score_text(cell['score'])} {interval_text(cell['score_lo'], cell['score_hi'])} · n {cell['n']}"
    place = f"{cell['length']:,.0f} tokens, depth {cell['depth']:.0%}"
    full = f"full cache here {score_text(cell['full_score'])} · KV {iec(cell['bytes_context'])}"
    floor = "<br>† the full cache scores at chance here: this cell tells nothing" if _mark(cell) else ""
    return f"<b>{cell['label']}</b><br>{place}<br>{score}<br>{full}{floor}"
