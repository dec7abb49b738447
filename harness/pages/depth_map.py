"""The map of a page, length across and depth down, from a table of cells."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.looks import INK, layout
from harness.pages.units import iec, interval_text, score_text

_ROW, _MOST = 46, 640  # pixels of a row, and of all rows together
_TEXTS = 24  # rows up to which a cell has room for its number

Map = dict[str, Any]


def heat(cells: pd.DataFrame, chosen: str, title: str | None = None) -> tuple[go.Figure, dict[str, Map]]:
    """(figure, its maps by label): full cache left, the chosen point right, length across and depth down.

    The chosen point is shown under its label, or under `title`.
    """
    lengths, depths = sorted(cells["length"].unique()), sorted(cells["depth"].unique())
    rows: dict[str, dict[tuple[float, float], Row]] = defaultdict(dict)
    for row in rows_of(cells):
        rows[row["label"]][row["length"], row["depth"]] = row
    maps = {label: _map(own, lengths, depths) for label, own in rows.items()}
    shown = [BASE if BASE in maps else chosen, chosen]
    titles = [shown[0], title or chosen] if shown[0] != chosen else [title or chosen] * 2
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    bounded = cells["score"].between(0, 1).all()
    limits = (0.0, 1.0) if bounded else (cells["score"].min(), cells["score"].max())
    for column, (label, title_of) in enumerate(zip(shown, titles, strict=True), start=1):
        trace = go.Heatmap(
            **maps[label],
            x=[f"{length:,.0f}" for length in lengths],
            y=_depth_names(cells, depths),
            texttemplate="%{text}" if len(depths) <= _TEXTS else "",
            hovertemplate=f"<b>{title_of}</b><br>%{{customdata}}<extra></extra>",
            colorscale="Cividis",
            zmin=limits[0],
            zmax=limits[1],
            xgap=3,
            ygap=3 if len(depths) <= _TEXTS else 0,
            colorbar={
                "title": {"text": cells["metric"].iloc[0], "font": {"size": 13}},
                "thickness": 12,
                "outlinewidth": 0,
            },
            showscale=column == 2,
        )
        figure.add_trace(trace, row=1, col=column)
    figure.update_layout(layout(height=140 + min(_ROW * len(depths), _MOST)))
    figure.update_annotations(font={"size": 14, "color": INK})
    figure.update_xaxes(title={"text": "length in tokens", "font": {"size": 13}}, type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_yaxes(title={"text": "depth of the answer in the context", "font": {"size": 13}}, col=1)
    return figure, maps


def _depth_names(cells: pd.DataFrame, depths: list[float]) -> list[str]:
    """The mean depth at which the answers of a row really are, the asked one where that is not known; all different."""
    real = cells.groupby("depth")["depth_realised"].mean()
    names = [f"{real[depth] if math.isfinite(real[depth]) else depth:.0%}" for depth in depths]
    if len(set(names)) == len(names):
        return names
    return [f"{name} (asked {depth:.4%})" for name, depth in zip(names, depths, strict=True)]


def _map(rows: dict[tuple[float, float], Row], lengths: list[float], depths: list[float]) -> Map:
    grid = [[rows.get((length, depth)) for length in lengths] for depth in depths]
    return {
        "z": [
            [None if c is None or not math.isfinite(c["score"]) else float(f"{c['score']:.6g}") for c in line] for line in grid
        ],
        "text": [["" if c is None else score_text(c["score"]) + _mark(c) for c in line] for line in grid],
        "customdata": [["not run" if c is None else _cell_hover(c) for c in line] for line in grid],
    }


def _mark(cell: Row) -> str:
    return " †" if pd.notna(cell["discriminative"]) and not cell["discriminative"] else ""


def _cell_hover(cell: Row) -> str:
    score = f"{score_text(cell['score'])} {interval_text(cell['score_lo'], cell['score_hi'])} · n {cell['n']}"
    depth = f"depth {cell['depth']:.0%}"
    if math.isfinite(cell["depth_realised"]):
        depth = f"depth {cell['depth_realised']:.1%} (asked: {cell['depth']:.0%})"
    place = f"{cell['length']:,.0f} tokens, {depth}"
    full = f"full cache here {score_text(cell['full_score'])}<br>KV {iec(cell['bytes_context'])}"
    floor = "<br>† the full cache scores at chance here: this cell tells nothing" if _mark(cell) else ""
    return f"{place}<br>{score}<br>{full}{floor}"
