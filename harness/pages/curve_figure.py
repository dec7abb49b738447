"""Perplexity by position as a figure, from a table of curves and a ranked panel.

All points are traces of one figure. Which of them are shown is a list of booleans for each budget, so a page with many
lines opens with one line a stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from harness.analysis.point_row import BASE
from harness.pages.hover import hover
from harness.pages.looks import AXIS, Look, layout, legend, legend_height
from harness.pages.units import score_text, small

Y_TITLES = {"perplexity": "perplexity (lower is better)", "kl": "KL to the full cache, nats a token (lower is better)"}
ALL = "all"
_MARGIN = {"l": 64, "r": 16, "t": 24, "b": 60}
_FIRST = 0.25  # share of the tokens kept that a page opens with


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

    A choice is a budget of this panel. Each stack shows its point nearest to it, by the share of tokens kept at the
    end, so stacks with budgets in other units are there too; points without a budget are always shown.
    """
    kept = [_kept(row) for row, _ in lines]
    groups: dict[str, list[float]] = {}
    for (row, _), share in zip(lines, kept, strict=True):
        if not math.isnan(share):
            groups.setdefault(_name(row), []).append(share)
    means = {name: sum(shares) / len(shares) for name, shares in groups.items()}
    choices = {name: _nearest(lines, kept, means[name]) for name in sorted(means, key=lambda name: (means[name], name))}
    first = min(choices, key=lambda name: abs(means[name] - _FIRST), default=ALL)
    return choices | {ALL: [True] * len(lines)}, first


def _kept(row: pd.Series[Any]) -> float:
    """Share of the tokens seen that are held at the end; NaN for a point without a budget."""
    return float(row["tokens_kept"] / row["tokens_seen"]) if math.isfinite(row["budget_value"]) else math.nan


def _name(row: pd.Series[Any]) -> str:
    unit = f"{row['budget_unit']} " if pd.notna(row["budget_unit"]) else ""
    return f"{unit}{row['budget_value']:g}"


def _nearest(lines: list[tuple[pd.Series[Any], pd.DataFrame]], kept: list[float], target: float) -> list[bool]:
    away = [math.inf if math.isnan(share) else abs(share - target) for share in kept]
    least: dict[str, float] = {}
    for (row, _), distance in zip(lines, away, strict=True):
        least[row["stack"]] = min(distance, least.get(row["stack"], math.inf))
    return [d == least[row["stack"]] or math.isnan(k) for (row, _), d, k in zip(lines, away, kept, strict=True)]


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
        meta={"kl": values["kl"]},
    )


def _bucket(bucket: pd.Series[Any]) -> str:
    documents = f"{bucket['documents']} document{'s' * (bucket['documents'] != 1)}"
    return (
        f"positions {bucket['start']:,}–{bucket['stop'] - 1:,}: perplexity <b>{score_text(bucket['perplexity'])}</b>"
        f"  ·  KL {small(bucket['kl'])}  ·  n {bucket['tokens']:,} tokens of {documents}"
    )
