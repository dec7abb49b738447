"""The tables of a page as its script fills them: all points of a panel, and several tasks or models together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from harness.analysis.point_measures import FIDELITY
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages import glossary
from harness.pages.hover import is_stream
from harness.pages.markup import markup
from harness.pages.table import problems
from harness.pages.units import difference, iec, interval_text, score_text, share_text, small
from harness.pages.words import together
from harness.pages.words.columns import tip
from harness.pages.words.remarks import kept_share, peak_text, remarks
from harness.pages.words.verdicts import NATS

NUMBER, VERDICT, WORDS = "v", "t", "l"  # the first letter of a cell
PAPER = (
    *("stack and point", "n", "score", "95 %", "vs full", "95 % paired", "verdict"),
    *("KV bytes", "of full", "peak incl. prefill"),
)  # columns that go into LaTeX and Markdown; of a joint table all do


def points_table(panel: pd.DataFrame, ident: str) -> tuple[str, list[list[str]], list[int]]:
    """(table, rows, ids) of all points, sortable by column; frontier rows are bold, a verdict says on hover what it means.

    The page's script fills the rows in; a row is its class and its cells, each a letter for what it is and its content.
    """
    faithful = bool(panel[list(FIDELITY)].notna().any(axis=None))
    ordered = rows_of(panel.sort_values(["bytes_context", "label"]))
    cells = [_cells(row, faithful) for row in ordered]
    rows = [_row(row, own) for row, own in zip(ordered, cells, strict=True)]
    heads = [_head(name, cell, paper=name.split(" (")[0] in PAPER) for name, cell in cells[0].items()]
    return _table(ident, f"<tr>{''.join(heads)}</tr>"), rows, [row["id"] for row in ordered]


def joint_table(found: together.Together, ident: str) -> tuple[str, list[list[str]]]:
    """(table, rows) of several tasks or models together; a row of heads above says of which of them the columns are."""
    every = together.cells(found)
    coded = [[_coded(cell) for cell in cells] for cells in every]
    fronts = [any(cell.text == "●" for cell in cells[-len(found.fronts) :]) for cells in every]
    bases = [next(iter(arm.values()))["stack"] == BASE for arm in found.arms]
    named = together.columns(found)
    heads = [_head(head, cell, paper=True, of=of, below=True) for (of, head), cell in zip(named, coded[0], strict=True)]
    rows = [["base" if base else "front" if on else "", *cells] for base, on, cells in zip(bases, fronts, coded, strict=True)]
    return _table(ident, f"<tr>{_groups([of for of, _ in named])}</tr><tr>{''.join(heads)}</tr>"), rows


def _groups(named: Sequence[str]) -> str:
    """The upper row of heads: one for neighbours of one group."""
    found: list[tuple[str, int]] = []
    for of in named:
        if found and found[-1][0] == of:
            found[-1] = (of, found[-1][1] + 1)
        else:
            found.append((of, 1))
    return "".join(f'<th colspan={width} class="l of">{of}</th>' for of, width in found)


def _table(ident: str, head: str) -> str:
    return f'<div class="scroll"><table id="{ident}"><thead>{head}</thead><tbody></tbody></table></div>'


def _head(name: str, cell: str, *, paper: bool, of: str = "", below: bool = False) -> str:
    """A head with what its column holds on hover; `of` is the group that exports put before its name, `below` a second row."""
    names = " ".join(["l"] * (not cell.startswith(NUMBER)) + ["below"] * below)
    marks = [f' class="{names}"'] if names else []
    marks += [" data-paper"] if paper else []
    marks += [f' data-of="{of}"'] if of else []
    return f'<th{"".join(marks)} title="{markup(tip(name))}"><button type="button">{name}</button></th>'


def _cells(row: Row, faithful: bool) -> dict[str, str]:
    """The cells of a point by column name, the same names for all points of a panel."""
    base, bits, stream = row["stack"] == BASE, row["effective_bits"], is_stream(row)
    mean, end = (" (time mean)", "at the end") if stream else ("", "end of answer")
    found, kept = difference(row), kept_share(row)
    alone, _, within = found.text.partition(" ")
    unit = NATS if found.in_nats else ""
    return {
        "stack and point": _words(row["label"]),
        "n": _number(row["n"], str(row["n"])),
        "score": _number(row["score"], score_text(row["score"])),
        "95 %": _words(interval_text(row["score_lo"], row["score_hi"])),
        "vs full": _number(found.value, "" if base else f"{alone}{unit}"),
        "95 % paired": _words(within),
        "verdict": VERDICT + (glossary.VERDICTS["base"].printed if base else glossary.judged(row)),
        "Holm p": _number(row["holm_p"], small(row["holm_p"])),
        "could prove": _number(row["detectable"], f"{small(row['detectable'])}{unit}"),
        "settled by": _number(row["settled_by"], f"{row['settled_by']:,.0f}" if math.isfinite(row["settled_by"]) else ""),
        f"KV bytes{mean}": _number(row["bytes_context"], iec(row["bytes_context"])),
        "of full": _number(row["ratio"], share_text(row["ratio"])),
        "peak incl. prefill": _number(row["bytes_peak_most"], peak_text(row)),
        "kept": _number(kept, share_text(kept)),
        **(_fidelity(row) if faithful else {}),
        "logical, at the end" if stream else "logical": _number(row["bytes_logical"], iec(row["bytes_logical"])),
        "storage": _words(row["storage"]),
        end: _number(row["bytes_final"], iec(row["bytes_final"])),
        "peak while answering": _number(row["bytes_peak"], iec(row["bytes_peak"])),
        "bits / value": _number(bits, f"{bits:.2f}" if math.isfinite(bits) else "–"),
        "frontier": _words("●" if row["on_frontier"] else ""),
        "chance of it": _number(row["p_frontier"], share_text(row["p_frontier"])),
        "notes": _words("; ".join([*problems(row), *remarks(row)])),
    }


def _fidelity(row: Row) -> dict[str, str]:
    return {
        "KL to full": _number(row["kl_to_full"], small(row["kl_to_full"])),
        "top-1 agreement": _number(row["top1_agreement"], share_text(row["top1_agreement"])),
        "attention error": _number(row["attention_error"], small(row["attention_error"])),
        "nats / byte": _number(row["nll_per_byte"], score_text(row["nll_per_byte"])),
    }


def _row(row: Row, cells: Mapping[str, str]) -> list[str]:
    return ["base" if row["stack"] == BASE else "front" if row["on_frontier"] else "", *cells.values()]


def _coded(cell: together.Cell) -> str:
    if cell.verdict:
        return VERDICT + cell.text
    return _words(cell.text) if cell.value is None else _number(cell.value, cell.text)


def _words(text: str) -> str:
    return WORDS + text


def _number(value: float, text: str) -> str:
    return f"{NUMBER}{'' if math.isnan(value) else f'{value:.6g}'}|{text}"
