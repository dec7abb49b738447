"""Points and contrasts for a terminal; it takes a ranked points table or a contrasts table, and computes nothing.

Works without a terminal too: then the width is fixed.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.files import printable
from harness.run.pareto import GROUP
from harness.run.point_row import BASE, RUN_GROUP
from harness.run.units import iec, interval_text, mode, score_text, share_text, signed, small

WIDTH = 120
_VERDICTS = {"equal within noise": "= full", "clearly below": "clearly below", "": "–"}


def text(ranked: pd.DataFrame, width: int = WIDTH) -> str:
    """The tables as plain text of a fixed width."""
    sink = io.StringIO()
    show(ranked, Console(file=sink, width=width, color_system=None, force_terminal=False))
    return sink.getvalue()


def show(ranked: pd.DataFrame, console: Console | None = None) -> None:
    """Print one table per run and mode, sorted by bytes, with what could not be scored below it."""
    console = console or _console()
    for _, group in ranked.groupby(list(GROUP), sort=False):
        console.print(_table(group))


def show_contrasts(contrasts: pd.DataFrame, console: Console | None = None) -> None:
    """Print one table per run, mode and point that others are compared with, sorted as the points table."""
    console = console or _console()
    for _, group in contrasts.groupby([*RUN_GROUP, "against"], sort=False):
        console.print(_contrast_table(group))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None)


def _empty(first: pd.Series[Any], what: str = "") -> Table:
    better = "higher" if first["higher_is_better"] else "lower"
    title = f"{first['model']} · {first['task']} · {mode(first)} · {first['metric']} ({better} is better){what}"
    table = Table(
        title=escape(printable(title)), title_justify="left", title_style="bold", expand=False, pad_edge=False, box=SIMPLE_HEAD
    )
    table.add_column("stack", overflow="fold", min_width=12)
    return table


def _table(group: pd.DataFrame) -> Group:
    table = _empty(group.iloc[0])
    for name in ("n", "score [95 %]", "vs full [95 %, paired]"):
        table.add_column(name, justify="right" if name == "n" else "left", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("KV bytes", "of full"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("front", justify="center", no_wrap=True)
    for _, row in group.sort_values(["bytes_context", "label"], na_position="last").iterrows():
        table.add_row(*_cells(row), style="dim" if not row["on_frontier"] and row["stack"] != BASE else "")
    return Group(table, Text("\n".join(map(printable, _notes(group))), style="italic"), Text(""))


def _cells(row: pd.Series[Any]) -> tuple[str | Text, ...]:
    difference = f"{signed(row['diff_to_full'])} {interval_text(row['diff_lo'], row['diff_hi'])}".strip()
    return (
        Text(printable(row["label"])),
        str(row["n"]),
        f"{score_text(row['score'])} {interval_text(row['score_lo'], row['score_hi'])}".strip(),
        "base" if row["stack"] == BASE else difference,
        "" if row["stack"] == BASE else _VERDICTS.get(row["vs_full"], row["vs_full"]),
        iec(row["bytes_context"]) + ("*" if row["storage"] == "simulated" else ""),
        share_text(row["ratio"]),
        "●" if row["on_frontier"] else "",
    )


def _notes(group: pd.DataFrame) -> list[str]:
    lines = ["● front: no other point does better for as few bytes. = full: the paired interval holds 0 within ±0.15."]
    if (group["storage"] == "simulated").any():
        lines.append("*: simulated storage; the bytes are what a packed store would hold.")
    if group["discriminative"].eq(False).any():
        lines.append("Not discriminative: the full cache scores at chance, so these stacks cannot be told apart.")
    for _, row in group.iterrows():
        if pd.notna(row["score_later"]):
            scores = f"{score_text(row['score_first'])}, later ones {score_text(row['score_later'])}"
            lines.append(f"{row['label']}: first questions {scores}.")
        lines += [f"{row['label']}: {problem}" for problem in problems(row)]
    return lines


def problems(row: pd.Series[Any]) -> list[str]:
    """What a reader of this row has to know: examples without a score, missing comparison, not ranked."""
    words = {"n_failed": "failed", "n_refused": "refused", "n_truncated": "truncated", "n_unscored": "without a score"}
    words |= {"n_not_exercised": "not compressed (short)", "n_superseded": "replaced by a later record"}
    found = [f"{row[name]} {word}" for name, word in words.items() if row[name] and not _base_only(name, row)]
    lines = [", ".join(found) + (f" - {row['error']}" if pd.notna(row["error"]) else "")] if found else []
    if row["stack"] != BASE and row["n"] and pd.notna(row["diff_reason"]):
        lines.append(f"no comparison: {row['diff_reason']}")
    if pd.notna(row["left_out"]) and (row["n"] or not found):
        lines.append(f"not ranked: {row['left_out']}")
    return lines


def _base_only(name: str, row: pd.Series[Any]) -> bool:
    return name == "n_not_exercised" and row["stack"] == BASE


def _contrast_table(group: pd.DataFrame) -> Group:
    against = group["against"].iloc[0]
    table = _empty(group.iloc[0], f" · against {against}")
    for name in ("n", "score", "against"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("difference [95 %, paired]", no_wrap=True)
    table.add_column("McNemar p", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("bytes to it", justify="right", no_wrap=True)
    for _, row in group.sort_values(["bytes_context", "label"], na_position="last").iterrows():
        table.add_row(*_contrast_cells(row))
    return Group(table, Text("\n".join(map(printable, _contrast_notes(group, against))), style="italic"), Text(""))


def _contrast_cells(row: pd.Series[Any]) -> tuple[str | Text, ...]:
    simulated = "simulated" in (row["storage"], row["against_storage"])
    return (
        Text(printable(row["label"])),
        str(row["n_shared"]),
        score_text(row["score"]),
        score_text(row["against_score"]),
        f"{signed(row['diff_to_against'])} {interval_text(row['diff_lo'], row['diff_hi'])}".strip(),
        small(row["mcnemar_p"]),
        row["verdict"] or "–",
        share_text(row["bytes_ratio"]) + ("*" if simulated else ""),
    )


def _contrast_notes(group: pd.DataFrame, against: str) -> list[str]:
    lines = [f"difference: the stack minus {against} on the same prompts; above is better, below is worse, whatever the sign."]
    lines.append("Every interval and p stands for itself: none is adjusted for how many points are compared.")
    if (group[["storage", "against_storage"]] == "simulated").any(axis=None):
        lines.append("*: simulated storage; the bytes are what a packed store would hold.")
    for reason, rows in group.groupby("reason", sort=False):
        lines.append(f"no comparison: {reason}: {', '.join(rows['label'])}")
    for _, row in group[group["reason"].isna() & (group["n"] < group["against_n"])].iterrows():
        lines.append(
            f"{row['label']}: on the {row['n_shared']} of {row['against_n']} prompts of {against} that it was scored on"
        )
    return lines
