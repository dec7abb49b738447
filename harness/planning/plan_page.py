"""A plan as a page: KV bytes against length and against batch, with what accelerators leave room for. Nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.analysis.point_row import BASE
from harness.pages.frame import render
from harness.pages.looks import AXIS, INK, MUTED, Look, layout, legend, legend_height, looks
from harness.pages.markup import as_markup, markup
from harness.pages.units import iec
from harness.records.atomic import replace

_MARGIN = {"l": 72, "r": 16, "t": 44, "b": 60}


def write(path: Path, sizes: pd.DataFrame, fits: pd.DataFrame, lines: Sequence[str]) -> None:
    """Write the page, and the sizes as CSV beside it. lines: said below the figure."""
    figure = draw(as_markup(sizes.convert_dtypes()), fits)
    model = markup(sizes["model"].iloc[0])
    title = f"KV bytes of {model}, planned"
    notes = "".join(f"<p>{markup(line)}</p>" for line in lines)
    body = f'<h1>{title}</h1><p>From shapes alone, nothing was run.</p><div id="plan" class="plot"></div>{notes}'
    empty = ("heat", "titles", "views", "shown", "windows", "tables")
    content = {"figures": {"plan": figure.to_plotly_json()}, **{name: {} for name in empty}}
    page = render(title, body, content)
    replace(path, lambda file: file.write_text(page, encoding="utf-8"))
    replace(path.with_suffix(".csv"), lambda file: sizes.to_csv(file, index=False))


def draw(sizes: pd.DataFrame, fits: pd.DataFrame) -> go.Figure:
    """Bytes against the length at the first batch, and against the batch at the last length."""
    batch, seq = sizes["batch"].iloc[0], sizes["seq"].iloc[-1]
    titles = (f"<b>{batch} sequence{'s' if batch > 1 else ''}</b> by length", f"<b>{seq:,} tokens</b> by number of sequences")
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=titles)
    styles = looks(sizes["stack"], BASE)
    for stack, lines in sizes.groupby("stack", sort=False):
        by_length, by_batch = lines[lines["batch"] == batch], lines[lines["seq"] == seq]
        figure.add_trace(_trace(by_length, "seq", styles[str(stack)], shown=True), row=1, col=1)
        figure.add_trace(_trace(by_batch, "batch", styles[str(stack)], shown=False), row=1, col=2)
    for name, room in {} if fits.empty else fits.drop_duplicates("gpu").set_index("gpu")["room"].items():
        if room > 0:
            note = f"{markup(name)}: {iec(room)} beside the weights"
            line = {"color": MUTED, "width": 1, "dash": "dot"}
            figure.add_hline(y=room, line=line, row=1, col=1)
            place = {"xref": "x domain", "x": 0.01, "yref": "y", "y": math.log10(room), "yanchor": "bottom"}
            figure.add_annotation(text=note, showarrow=False, **place)  # a logarithmic axis wants its own units
            figure.add_hline(y=room, line=line, row=1, col=2)
    height = legend_height(sizes["stack"].nunique(), 520, _MARGIN)
    figure.update_layout(layout(height=height, margin=_MARGIN, legend=legend("togglegroup")))
    figure.update_xaxes(**AXIS, type="log")
    ticks = [1024**power * step for power in range(1, 5) for step in (1, 8, 64, 512)]
    figure.update_yaxes(**AXIS, type="log", tickvals=ticks, ticktext=[iec(tick) for tick in ticks])
    figure.update_xaxes(title={"text": "tokens of a sequence", "font": {"size": 13}}, col=1)
    figure.update_xaxes(title={"text": "sequences", "font": {"size": 13}}, col=2)
    figure.update_yaxes(title={"text": "KV bytes, on pages", "font": {"size": 13}, "standoff": 12}, automargin=True, col=1)
    figure.update_annotations(font={"color": INK, "size": 12})
    return figure


def _trace(lines: pd.DataFrame, x: str, look: Look, *, shown: bool) -> go.Scatter:
    stack = str(lines["stack"].iloc[0])
    return go.Scatter(
        x=lines[x].tolist(),
        y=lines["kv_bytes_paged"].tolist(),
        name=stack,
        legendgroup=stack,
        legendrank=look.rank,
        showlegend=shown,
        mode="lines+markers",
        line={"color": look.colour, "width": 1.6, "dash": look.dash},
        marker={"symbol": look.symbol, "size": 8, "color": look.colour},
        customdata=[_hover(row) for row in lines.to_dict("records")],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _hover(row: Mapping[Hashable, Any]) -> str:
    sizes = f"{iec(row['kv_bytes'])}, {iec(row['kv_bytes_paged'])} on pages"
    return f"<b>{row['stack']}</b><br>{row['batch']} x {row['seq']:,} tokens<br>{sizes}"
