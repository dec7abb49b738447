"""Scores by place: perplexity by position as lines, and scores by length and depth as maps.

All points of a panel are lines of one figure. Which of them are shown is a list of booleans for each budget, so a page with
many lines opens with one line a stack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.hover import hover
from harness.pages.looks import AXIS, INK, Look, colorbar, layout, legend, legend_height
from harness.pages.units import iec, interval_text, score_text, small
from harness.pages.words.remarks import kept_otherwise, kept_share

Y_TITLES = {"perplexity": "perplexity (lower is better)", "kl": "KL to the full cache, nats a token (lower is better)"}
ALL = "all"
_MARGIN = {"l": 64, "r": 16, "t": 24, "b": 60}
_FIRST = 0.25  # share of the tokens kept that a page opens with
_CELL, _TALLEST = 46, 640  # pixels of a row of a map, and of all of them together
_TEXTS = 24  # rows of a map up to which a cell has room for its number

Map = dict[str, Any]


def of_panel(curves: pd.DataFrame, panel: pd.DataFrame) -> list[tuple[pd.Series[Any], pd.DataFrame]]:
    """(point, its buckets) of every point of the panel that has a curve; the full cache comes last, on top."""
    known = {key: part for key, part in curves.groupby(["run_id", "model", "task", "query_aware", "attn", "label"], sort=False)}
    points = panel.assign(base=panel["stack"] == BASE).sort_values(["base", "stack", "tokens_kept", "label"])
    pairs = []
    for _, row in points.iterrows():
        part = known.get(tuple(row[name] for name in ("run_id", "model", "task", "query_aware", "attn", "label")))
        if part is not None:
            pairs.append((row, part))
    return pairs


def by_position(lines: list[tuple[pd.Series[Any], pd.DataFrame]], looks: Mapping[str, Look], shown: list[bool]) -> go.Figure:
    """One line a point with its stack's look; points of one stack differ by the size of their markers."""
    figure = go.Figure()
    for (row, part), visible in zip(lines, shown, strict=True):
        figure.add_trace(_line(row, part, looks[str(row["stack"])]).update(visible=visible))
    figure.update_layout(
        layout(
            height=legend_height(sum(shown), 480, _MARGIN),
            margin=_MARGIN,
            legend=legend("toggleitem"),
            showlegend=True,
        )
    )
    figure.update_xaxes(**AXIS, title={"text": "position in the document, tokens", "font": {"size": 13}}, tickformat=",d")
    figure.update_yaxes(**AXIS, type="log", title={"text": Y_TITLES["perplexity"], "font": {"size": 13}})
    return figure


def budgets(lines: list[tuple[pd.Series[Any], pd.DataFrame]]) -> tuple[dict[str, list[bool]], str]:
    """(which lines each choice shows, the choice to begin with).

    A choice is a budget of this panel. A stack shows its points at that budget; one without any shows the point nearest to
    them, by the share of tokens kept at the end, so budgets in other units are there too; points without a budget always show.
    """
    kept = [_kept(row) for row, _ in lines]
    groups: dict[str, list[float]] = {}
    for (row, _), share in zip(lines, kept, strict=True):
        if not math.isnan(share):
            groups.setdefault(_name(row), []).append(share)
    means = {name: sum(shares) / len(shares) for name, shares in groups.items()}
    choices = {name: _at(name, lines, kept, means[name]) for name in sorted(means, key=lambda name: (means[name], name))}
    first = min(choices, key=lambda name: abs(means[name] - _FIRST), default=ALL)
    return choices | {ALL: [True] * len(lines)}, first


def _kept(row: pd.Series[Any]) -> float:
    """Share of the tokens seen that are held at the end; NaN for a point without a budget."""
    return kept_share(row) if math.isfinite(row["budget_value"]) else math.nan


def _name(row: pd.Series[Any]) -> str:
    unit = f"{row['budget_unit']} " if pd.notna(row["budget_unit"]) else ""
    return f"{unit}{row['budget_value']:g}"


def _at(name: str, lines: list[tuple[pd.Series[Any], pd.DataFrame]], kept: list[float], target: float) -> list[bool]:
    """Whether each line is shown at the budget of this name, whose points keep a share of `target` on average."""
    named = [not math.isnan(share) and _name(row) == name for (row, _), share in zip(lines, kept, strict=True)]
    have = {row["stack"] for (row, _), own in zip(lines, named, strict=True) if own}
    nearest = _nearest(lines, kept, target)
    return [
        math.isnan(share) or (own if row["stack"] in have else near)
        for (row, _), share, own, near in zip(lines, kept, named, nearest, strict=True)
    ]


def _nearest(lines: list[tuple[pd.Series[Any], pd.DataFrame]], kept: list[float], target: float) -> list[bool]:
    away = [math.inf if math.isnan(share) else abs(share - target) for share in kept]
    least: dict[str, float] = {}
    for (row, _), distance in zip(lines, away, strict=True):
        least[row["stack"]] = min(distance, least.get(row["stack"], math.inf))
    return [distance == least[row["stack"]] for (row, _), distance in zip(lines, away, strict=True)]


def other_shares(lines: list[tuple[pd.Series[Any], pd.DataFrame]]) -> list[str]:
    """Points that kept another share of the tokens than the fraction they are named by, with that share, as markup."""
    return [f"{row['label']} {kept_share(row):.0%}" for row, _ in lines if kept_otherwise(row)]


def _line(row: pd.Series[Any], part: pd.DataFrame, look: Look) -> go.Scatter:
    base = row["stack"] == BASE
    share = _kept(row)
    size = 7.0 if math.isnan(share) else 5 + 4 * min(share, 1.0)
    values = {name: [float(f"{value:.6g}") for value in part[name]] for name in Y_TITLES}
    about = hover(row)  # once in the template, not once for every bucket
    return go.Scatter(
        x=[round(value, 1) for value in part["position"]],
        y=values["perplexity"],
        name=row["short"],
        legendgroup=row["stack"],
        legendrank=look.rank,
        mode="lines+markers",
        line={"color": look.colour, "width": 2.4 if base else 1.6, "dash": look.dash},
        marker={"symbol": [look.marker(row["storage"])] * len(part), "color": look.colour, "size": size},
        text=[_bucket(bucket) for _, bucket in part.iterrows()],
        hovertemplate=f"%{{text}}<br>{about}<extra></extra>",
        meta={"kl": values["kl"], "id": row["id"]},
    )


def _bucket(bucket: pd.Series[Any]) -> str:
    documents = f"{bucket['documents']} document{'s' * (bucket['documents'] != 1)}"
    return (
        f"positions {bucket['start']:,}–{bucket['stop'] - 1:,}: perplexity <b>{score_text(bucket['perplexity'])}</b>"
        f"  ·  KL {small(bucket['kl'])}  ·  n {bucket['tokens']:,} tokens of {documents}"
    )


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
            colorbar=colorbar(cells["metric"].iloc[0]),
            showscale=column == 2,
        )
        figure.add_trace(trace, row=1, col=column)
    figure.update_layout(layout(height=140 + min(_CELL * len(depths), _TALLEST)))
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
