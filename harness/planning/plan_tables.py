"""A plan for a terminal, or as plain text of a fixed width where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.pages.markup import one_line
from harness.pages.units import iec, share_text
from harness.types import BYTE_KINDS

WIDTH = 120


def show(sizes: pd.DataFrame, fits: pd.DataFrame, console: Console | None = None) -> None:
    """Print the bytes of every stack, a table a length and batch, and what fits where."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None))
    for (seq, batch), group in sizes.groupby(["seq", "batch"], sort=False):
        new = f" + {group['new'].iloc[0]} new" if group["new"].iloc[0] else ""
        console.print(_sizes(group, f"{group['model'].iloc[0]} · {batch} x {seq:,}{new} tokens"))
    for name, group in fits.groupby("gpu", sort=False) if len(fits) else ():
        console.print(_fits(group, str(name)))


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=Text(one_line(title)), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _sizes(group: pd.DataFrame, title: str) -> Group:
    kinds = [kind for kind in BYTE_KINDS if kind in group and group[kind].any()]
    table = _table(title, "stack", "KV bytes", "of full", "B/token", "on pages", *kinds)
    for row in group.to_dict("records"):
        table.add_row(
            Text(one_line(row["stack"])),
            _bytes(row["kv_bytes_low"], row["kv_bytes"]),
            share_text(row["ratio"]),
            f"{row['bytes_per_token']:,.0f}",
            iec(row["kv_bytes_paged"]),
            *(iec(row[kind]) if row[kind] else "" for kind in kinds),
        )
    return Group(table, Text("\n".join(_notes(group)), style="italic"), Text(""))


def _bytes(low: int, high: int) -> str:
    """A size, or its bounds."""
    ends = [iec(low), iec(high)]
    return ends[1] if low == high else f"at most {ends[1]}" if ends[0] == ends[1] else f"{ends[0]} .. {ends[1]}"


def _notes(group: pd.DataFrame) -> Iterator[str]:
    if not group["exact"].all():
        yield "Bounds where a split over layers or heads depends on what is in the cache; kinds are those of an even split."


def _fits(group: pd.DataFrame, name: str) -> Table:
    first = group.iloc[0]
    number = f"{first['gpus']} x " if first["gpus"] > 1 else ""
    title = f"{number}{name} · {iec(max(first['room'], 0))} for caches beside the weights"
    lengths = group["seq"].unique()
    table = _table(title, "stack", *(f"sequences of {seq:,}" for seq in lengths), "longest context")
    for stack, lines in group.groupby("stack", sort=False):
        counts = dict(zip(lines["seq"], lines["sequences"], strict=True))
        cells = [f"{counts[seq]:,}" if seq in counts else "" for seq in lengths]
        table.add_row(Text(one_line(str(stack))), *cells, f"{lines['longest'].iloc[0]:,}")
    return table
