"""Titles of panels and axes, and the figures of bytes, of bits and of several tasks or models together."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from harness.analysis.joint import Arm, arm_of
from harness.analysis.labels import bits_of, family_of, mode
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.hover import is_stream
from harness.pages.looks import AXIS, INK, KIND_LOOKS, MUTED, Look, colorbar, layout, legend, legend_height
from harness.pages.units import iec, score_text, share_text
from harness.types import BYTE_KINDS

_X_TITLES = {"bytes": "KV bytes of one sample, allocated", "ratio": "KV bytes as a share of the full cache"}
_STREAM_X_TITLES = {
    "bytes": "time mean of the KV bytes held while a document streams, allocated",
    "ratio": "time mean of the KV bytes as a share of that of the full cache",
}
_STREAM_END = "KV bytes held at the end of the stream, allocated"
_BARS = 60  # bars a page shows at a time
_NAMED = 8  # stacks that a cell of the map of bits names
_BITS = ("full", "quantization")  # families of stacks that differ in nothing but how many bits they store
_MARGIN = {"l": 64, "r": 16, "t": 24, "b": 60}


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
        customdata=points["hover"].tolist(),
        hovertemplate="%{customdata}<extra></extra>",
        meta={"ids": points["id"].tolist()},
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


def bits_map(panel: pd.DataFrame) -> go.Figure | None:
    """Bits of keys down, bits of values across: the best score of the stacks that only store in fewer bits, and their bytes.

    None where no two of them differ in their keys and no two in their values.
    """
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows_of(panel[panel["left_out"].isna()]):
        config = json.loads(row["stack_config"])
        bits = bits_of(config.get("keys")), bits_of(config.get("values"))
        if family_of(config) in _BITS and None not in bits:
            found[bits].append(row)  # type: ignore[index]
    keys, values = (sorted({bits[side] for bits in found}) for side in (0, 1))
    if len(keys) < 2 or len(values) < 2 or all(key == value for key, value in found):
        return None
    higher = bool(panel["higher_is_better"].iloc[0])
    ranked = {bits: sorted(rows, key=lambda row: -row["score"] if higher else row["score"]) for bits, rows in found.items()}
    grid = [[ranked.get((key, value), []) for value in values] for key in keys]
    scores = [rows[0]["score"] for rows in ranked.values()]
    shares = higher and 0 <= min(scores) and max(scores) <= 1
    figure = go.Figure(
        go.Heatmap(
            x=[f"{value} bit" for value in values],
            y=[f"{key} bit" for key in keys],
            z=[[float(f"{rows[0]['score']:.6g}") if rows else None for rows in line] for line in grid],
            text=[[_cell(rows[0]) if rows else "" for rows in line] for line in grid],
            texttemplate="%{text}",
            customdata=[["<br>".join(map(_named, rows[:_NAMED])) or "no such stack here" for rows in line] for line in grid],
            hovertemplate="keys %{y}, values %{x}<br>%{customdata}<extra></extra>",
            colorscale="Cividis",
            reversescale=not higher,
            **({"zmin": 0, "zmax": 1} if shares else {}),
            xgap=3,
            ygap=3,
            colorbar=colorbar(panel["metric"].iloc[0]),
            meta={"ids": [[rows[0]["id"] if rows else None for rows in line] for line in grid]},
        )
    )
    figure.update_layout(layout(height=160 + 58 * len(keys), margin=_MARGIN | {"l": 88, "t": 34}))
    figure.update_xaxes(title={"text": "bits of a value", "font": {"size": 13}}, type="category", showgrid=False)
    figure.update_yaxes(title={"text": "bits of a key", "font": {"size": 13}}, type="category", showgrid=False)
    return figure


def _cell(row: Row) -> str:
    return f"{score_text(row['score'])}<br>{share_text(row['ratio'])} of bytes"


def _named(row: Row) -> str:
    return f"<b>{row['label']}</b>  {score_text(row['score'])} at {share_text(row['ratio'])} of the bytes"


def joint(points: Sequence[Mapping[str, Any]], looks: Mapping[str, Look], places: Mapping[Arm, list[int]]) -> go.Figure:
    """Mean normalised score against mean share of bytes; bars reach the worst. `places`: of which points, by arm."""
    figure = go.Figure()
    known: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        known[point["stack"]].append(point)
    for stack, own in known.items():
        look = looks[stack]
        figure.add_scatter(
            x=[point["ratio"] for point in own],
            y=[point["score"] for point in own],
            name=stack,
            legendrank=look.rank,
            mode="lines+markers",
            line={"color": look.faded(0.3), "width": 1.2, "dash": look.dash},
            marker={
                "color": look.colour,
                "symbol": look.symbol,
                "size": [13 if bold else 9 for bold in _bold(own)],
                "opacity": [1.0 if bold else 0.6 for bold in _bold(own)],
                "line": {"width": [1.3 if bold else 0.6 for bold in _bold(own)], "color": INK},
            },
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [0.0] * len(own),
                "arrayminus": [point["score"] - point["worst"] for point in own],
                "width": 0,
                "thickness": 1,
                "color": look.faded(0.4),
            },
            customdata=[_joint_hover(point) for point in own],
            hovertemplate="%{customdata}<extra></extra>",
            meta=_joint_meta(own, places),
        )
    front = [point for point in points if point["on_frontier"]]
    line = {"color": INK, "width": 2, "shape": "hv"}
    figure.add_scatter(
        x=[point["ratio"] for point in front],
        y=[point["score"] for point in front],
        name="frontier",
        mode="lines",
        line=line,
        hoverinfo="skip",
    )
    figure.add_hline(y=1, line={"color": MUTED, "width": 1.2, "dash": "dot"}, layer="below")
    figure.update_layout(
        layout(height=legend_height(len(known) + 1, 420, _MARGIN), margin=_MARGIN, legend=legend("toggleitem"))
    )
    figure.update_xaxes(**AXIS, type="log", title={"text": "KV bytes as a share of the full cache", "font": {"size": 13}})
    figure.update_yaxes(**AXIS, title={"text": "mean of (score - chance) / (full - chance)", "font": {"size": 13}})
    return figure


def _bold(points: Sequence[Mapping[str, Any]]) -> list[bool]:
    return [point["on_frontier"] or point["stack"] == BASE for point in points]


def _joint_meta(own: Sequence[Mapping[str, Any]], places: Mapping[Arm, list[int]]) -> dict[str, Any]:
    sets = [places[arm_of(point)] for point in own]
    named = {i: point["label"] for i, (point, bold) in enumerate(zip(own, _bold(own), strict=True)) if bold}
    return {"ratio": [point["ratio"] for point in own], "ids": [one[0] for one in sets], "sets": sets, "labels": named}


def _joint_hover(point: Mapping[str, Any]) -> str:
    kept = (
        f"keeps {score_text(point['score'])} of the full cache's score above chance, at the worst {score_text(point['worst'])}"
    )
    return f"<b>{point['label']}</b><br>{kept}<br>{share_text(point['ratio'])} of the bytes"
