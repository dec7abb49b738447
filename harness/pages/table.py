"""Points and contrasts for a terminal, or as plain text of a fixed width where there is none.

Names that came from outside are shown as they are: no markup of the terminal's library, no control character.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.analysis.frontier import GROUP
from harness.analysis.intervals import TOO_FEW
from harness.analysis.labels import mode
from harness.analysis.point_row import BASE, RUN_GROUP
from harness.analysis.points import Row, rows_of
from harness.citations.bibliography import Entry
from harness.pages import glossary
from harness.pages.markup import one_line
from harness.pages.units import difference, iec, interval_text, score_text, share_text, small
from harness.pages.words.columns import Entry as Meaning
from harness.pages.words.remarks import above_full, remarks_of
from harness.pages.words.verdicts import NATS, compared

WIDTH = 120
_NAMED = 8  # points that a note names


def text(ranked: pd.DataFrame, width: int = WIDTH) -> str:
    """The tables as plain text of a fixed width."""
    sink = io.StringIO()
    show(ranked, Console(file=sink, width=width, color_system=None, force_terminal=False))
    return sink.getvalue()


def show(ranked: pd.DataFrame, console: Console | None = None) -> None:
    """Print one table per run and mode, sorted by bytes, with what could not be scored below it."""
    console = console or _console()
    groups = [group for _, group in ranked.groupby(list(GROUP), sort=False)]
    for title, group in zip(_titles(groups), groups, strict=True):
        console.print(_table(group, title))


def show_contrasts(contrasts: pd.DataFrame, console: Console | None = None) -> None:
    """Print one table per run, mode and point that others are compared with, sorted as the points table."""
    console = console or _console()
    groups = [group for _, group in contrasts.groupby([*RUN_GROUP, "against"], sort=False)]
    for title, group in zip(_titles(groups), groups, strict=True):
        console.print(_contrast_table(group, title))


def show_cells(title: str, rows: Sequence[Mapping[str, str]], notes: list[str]) -> None:
    """Print a table of texts by column, all rows alike, with notes below it."""
    table = _empty(title)
    for name in list(rows[0])[1:]:
        table.add_column(_plain(name))
    for row in rows:
        table.add_row(*map(_plain, row.values()))
    _console().print(Group(table, _notes_text(notes), Text("")))


def show_citations(found: Mapping[Entry, Sequence[str]], missing: Sequence[str], console: Console | None = None) -> None:
    """Print whom to cite for these stacks and tasks, a line each; `missing` are those that no entry stands for."""
    console = console or _console()
    lines = [f"{', '.join(names)}: {entry.line}" for entry, names in found.items()]
    lines += [f"{', '.join(missing)}: not of this program"] if missing else []
    console.print(Group(Text("What to cite", style="bold"), _notes_text(lines), Text("")))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None)


def _titles(groups: Sequence[pd.DataFrame]) -> list[str]:
    """What each table is of; tables that would be titled alike also say what tells them apart: their seeds, else their run."""
    plain = [_title(group.iloc[0]) for group in groups]
    known: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for title, group in zip(plain, groups, strict=True):
        known[title].append(group)
    return [title + _distinction(group, known[title]) for title, group in zip(plain, groups, strict=True)]


def _title(first: pd.Series[Any]) -> str:
    better = "higher" if first["higher_is_better"] else "lower"
    title = f"{first['model']} · {first['task']} · {mode(first)} · {first['metric']} ({better} is better)"
    return f"{title} · against {first['against']}" if "against" in first else title


def _distinction(group: pd.DataFrame, alike: Sequence[pd.DataFrame]) -> str:
    if len(alike) == 1:
        return ""
    seeds = {_seeds(one) for one in alike}
    return f" · seed {_seeds(group)}" if len(seeds) == len(alike) else f" · {group['run_id'].iloc[0]}"


def _seeds(group: pd.DataFrame) -> str:
    """The seeds of a points table; contrasts do not say them."""
    return ", ".join(group["seeds"].unique()) if "seeds" in group else ""


def _empty(title: str) -> Table:
    table = Table(
        title=_plain(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("stack", overflow="fold", min_width=12)
    return table


def _plain(text: object) -> Text:
    return Text(one_line(text))


def _notes_text(lines: list[str]) -> Text:
    return Text("\n".join(map(one_line, lines)), style="italic")


def _table(group: pd.DataFrame, title: str) -> Group:
    table, unit = _empty(title), ", nats" if group["nll_diff"].notna().any() else ""
    for name in ("n", "score [95 %]", f"vs full{unit} [95 %, paired]", "verdict"):
        table.add_column(name, justify="right" if name == "n" else "left", no_wrap=True)
    for name in ("KV bytes", "of full"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("front", justify="center", no_wrap=True)
    for row in rows_of(group.sort_values(["bytes_context", "label"], na_position="last")):
        table.add_row(*_cells(row), style="dim" if not row["on_frontier"] and row["stack"] != BASE else "")
    return Group(table, _notes_text(_notes(group)), Text(""))


def _cells(row: Row) -> tuple[str | Text, ...]:
    return (
        _plain(row["label"]),
        str(row["n"]),
        f"{score_text(row['score'])} {interval_text(row['score_lo'], row['score_hi'])}".strip(),
        "base" if row["stack"] == BASE else difference(row).text,
        "" if row["stack"] == BASE else glossary.judged(row).replace(NATS, ""),  # the head of the differences says it
        iec(row["bytes_context"]) + ("*" if row["storage"] == "simulated" else ""),
        share_text(row["ratio"]),
        "●" if row["on_frontier"] else "",
    )


def _notes(group: pd.DataFrame) -> list[str]:
    """What the labels of this table mean, then what a reader of its points has to know; points with one note share a line."""
    reach = group["reach"].mean()
    lines = [f"{share_text(reach)} {glossary.FLAGS['reach'].text}"] if reach < 1 else []
    lines += [entry.text for entry in _met(group)]
    notes: dict[str, list[str]] = defaultdict(list)
    for row in rows_of(group):
        if pd.notna(row["score_later"]):
            note = f"first questions {score_text(row['score_first'])}, later ones {score_text(row['score_later'])}."
            notes[note].append(row["label"])
        for problem in problems(row):
            notes[problem].append(row["label"])
    lines += [f"{kind}: {_names(points)}." for kind, points in remarks_of(group)]
    return lines + above_full(group) + [f"{_names(labels)}: {note}" for note, labels in notes.items()]


def _met(group: pd.DataFrame) -> Iterator[Meaning]:
    """The entries of the labels that the table prints."""
    yield glossary.FLAGS["frontier"]
    met = {compared(row).key for row in rows_of(group[group["stack"] != BASE])}
    yield from (entry for name, entry in glossary.VERDICTS.items() if name in met)
    if any(map(glossary.unheld, rows_of(group))):
        yield glossary.FLAGS["holm"]
    if (group["storage"] == "simulated").any():
        yield glossary.FLAGS["simulated"]
    if group["discriminative"].eq(False).any():
        yield glossary.FLAGS["not discriminative"]
    others = group[group["stack"] != BASE]
    yield from (entry for name, entry in glossary.COUNTS.items() if (others if _base_has(name) else group)[name].any())
    texts = "\n".join(group["warnings"].dropna())
    yield from (entry for name, entry in glossary.WARNINGS.items() if f"{name}: " in texts)


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:_NAMED]) + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")


def problems(row: Row) -> list[str]:
    """What a reader of this row has to know: examples without a score, warnings, missing comparison, not ranked."""
    base = row["stack"] == BASE
    found = [
        f"{row[name]} {entry.printed}"
        for name, entry in glossary.COUNTS.items()
        if row[name] and not (base and _base_has(name))
    ]
    lines = [", ".join(found) + (f" - {row['error']}" if pd.notna(row["error"]) else "")] if found else []
    if pd.notna(row["warnings"]):
        lines.append(f"warning: {row['warnings']}")
    if not base and row["n"] and pd.notna(row["diff_reason"]):
        lines.append(f"no comparison: {row['diff_reason']}")
    if pd.notna(row["left_out"]) and (row["n"] or not found):
        lines.append(f"not ranked: {row['left_out']}")
    return lines


def _base_has(name: str) -> bool:
    """Whether the count is what the full cache is, and so none worth a word there."""
    return name == "n_not_exercised"


def _contrast_table(group: pd.DataFrame, title: str) -> Group:
    against, unit = group["against"].iloc[0], ", nats" if group["nll_diff"].notna().any() else ""
    table = _empty(title)
    for name in ("n", "score", "against", f"difference{unit} [95 %, paired]", "McNemar p", "verdict", "bytes to it"):
        table.add_column(name, justify="left" if name.startswith(("difference", "verdict")) else "right", no_wrap=True)
    for row in rows_of(group.sort_values(["bytes_context", "label"], na_position="last")):
        table.add_row(*_contrast_cells(row))
    return Group(table, _notes_text(_contrast_notes(group, against)), Text(""))


def _contrast_cells(row: Row) -> tuple[str | Text, ...]:
    simulated = "simulated" in (row["storage"], row["against_storage"])
    return (
        _plain(row["label"]),
        str(row["n_shared"]),
        score_text(row["score"]),
        score_text(row["against_score"]),
        difference(row, "diff_to_against").text,
        small(row["mcnemar_p"]),
        glossary.verdict_text(compared(row)).replace(NATS, ""),  # the head of the differences says it
        share_text(row["bytes_ratio"]) + ("*" if simulated else ""),
    )


def _contrast_notes(group: pd.DataFrame, against: str) -> list[str]:
    lines = [f"difference: the stack minus {against} on the same prompts; (≤ X): it may do worse by up to X."]
    lines += ["The verdict says which is better, whatever the sign. Nothing is adjusted for how many points are compared."]
    if group["verdict"].eq(TOO_FEW).any():
        lines.append(glossary.VERDICTS[TOO_FEW].text)
    if (group[["storage", "against_storage"]] == "simulated").any(axis=None):
        lines.append("*: simulated storage; the bytes are what a packed store would hold.")
    for reason, rows in group.groupby("reason", sort=False):
        lines.append(f"no comparison: {reason}: {', '.join(rows['label'])}")
    for _, row in group[group["reason"].isna() & (group["n"] < group["against_n"])].iterrows():
        lines.append(
            f"{row['label']}: on the {row['n_shared']} of {row['against_n']} prompts of {against} that it was scored on"
        )
    return lines
