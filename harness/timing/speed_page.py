"""Speed for people: a table for the terminal, and a page with its own axes. Bytes that are held are on neither axis."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.analysis.point_row import BASE
from harness.pages.frame import render
from harness.pages.looks import AXIS, layout, looks
from harness.pages.markup import as_markup, markup, one_line
from harness.pages.units import iec
from harness.records.atomic import replace

WIDTH = 120
COLUMNS = (
    "stack",
    "first token",
    "of full",
    "tokens/s",
    "of full",
    "transient, reading",
    "transient, a step",
)
PANELS = (
    ("to_first", "time to first token, s"),
    ("rate", "tokens a second"),
    ("transient_decode", "transient bytes of a decoding step"),
)
_ROW, _MARGIN = 24, {"l": 170, "r": 16, "t": 44, "b": 60}


def show(found: pd.DataFrame, title: str, console: Console | None = None) -> None:
    """Print the table, and below it what could not be measured."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None))
    table = Table(title=Text(one_line(title)), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if at else "left", overflow="fold", no_wrap=bool(at))
    for row in _measured(found).to_dict("records"):
        table.add_row(*(Text(one_line(cell)) for cell in _cells(row)))
    console.print(table)
    for row in found[found["error"] != ""].to_dict("records"):
        console.print(Text(one_line(f"{row['arm']}: {row['error']}")))


def write(path: Path, found: pd.DataFrame, title: str, lines: Sequence[str]) -> None:
    """Write the page, and the table as CSV beside it. lines: said below the figure."""
    figure = draw(as_markup(_measured(found).convert_dtypes()))
    notes = "".join(f"<p>{markup(line)}</p>" for line in lines)
    body = f'<h1>{markup(title)}</h1><div id="speed" class="plot"></div>{notes}'
    content: dict[str, Any] = {"figures": {"speed": figure.to_plotly_json()}}
    content |= {name: {} for name in ("heat", "titles", "views", "shown", "windows", "tables")}
    page = render(markup(title), body, content)
    replace(path, lambda file: file.write_text(page, encoding="utf-8"))
    replace(path.with_suffix(".csv"), lambda file: found.to_csv(file, index=False))


def draw(found: pd.DataFrame) -> go.Figure:
    """A panel for each measure, an arm a line: the median, with bars from the least to the most of any repeat."""
    figure = make_subplots(rows=1, cols=len(PANELS), shared_yaxes=True, horizontal_spacing=0.03)
    styles = looks(found["stack"], BASE)
    for column, (name, title) in enumerate(PANELS, 1):
        for stack, lines in found.dropna(subset=[name]).groupby("stack", sort=False):
            look = styles[str(stack)]
            figure.add_trace(
                go.Scatter(
                    x=lines[name].tolist(),
                    y=lines["arm"].tolist(),
                    error_x=_spread(lines, name),
                    mode="markers",
                    marker={"symbol": look.symbol, "size": 9, "color": look.colour},
                    showlegend=False,
                    customdata=[_hover(row) for row in lines.to_dict("records")],
                    hovertemplate="%{customdata}<extra></extra>",
                ),
                row=1,
                col=column,
            )
        figure.update_xaxes(title={"text": title, "font": {"size": 13}}, rangemode="tozero", col=column)
    figure.update_layout(layout(height=len(found) * _ROW + _MARGIN["t"] + _MARGIN["b"], margin=_MARGIN))
    figure.update_xaxes(**AXIS)
    figure.update_yaxes(**AXIS, categoryorder="array", categoryarray=found["arm"].tolist()[::-1])
    return figure


def _measured(found: pd.DataFrame) -> pd.DataFrame:
    return found[found["error"] == ""]


def _spread(lines: pd.DataFrame, name: str) -> dict[str, Any] | None:
    if f"{name}_lo" not in lines:
        return None
    up, down = lines[f"{name}_hi"] - lines[name], lines[name] - lines[f"{name}_lo"]
    return {"type": "data", "array": up.tolist(), "arrayminus": down.tolist(), "thickness": 1, "width": 2}


def _cells(row: Mapping[Hashable, Any]) -> list[str]:
    return [
        str(row["arm"]),
        f"{row['to_first']:.3g} s",
        _times(row.get("to_first_ratio")),
        f"{row['rate']:.3g}",
        _times(row.get("rate_ratio")),
        _bytes(row["transient_read"]),
        _bytes(row["transient_decode"]),
    ]


def _times(ratio: float | None) -> str:
    return "–" if ratio is None or pd.isna(ratio) else f"{ratio:.2f}x"


def _bytes(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else iec(value)


def _hover(row: Mapping[Hashable, Any]) -> str:
    first, rate = f"{row['to_first']:.3g} s to the first token", f"{row['rate']:.3g} tokens a second"
    read, step = _bytes(row["transient_read"]), _bytes(row["transient_decode"])
    return f"<b>{row['arm']}</b><br>{first}<br>{rate}<br>beside what stays: reading {read}, a step {step}"
