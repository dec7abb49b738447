"""The words and tables of a page: facts, all points, what is not drawn, how it was made; HTML from ranked tables of markup."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.frontier import GROUP
from harness.analysis.labels import mode
from harness.analysis.point_measures import FIDELITY
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.citations.bibliography import Entry, bibtex
from harness.pages import glossary
from harness.pages.figures import panel_title
from harness.pages.headline import headline, joint_cells
from harness.pages.hover import flat, is_stream
from harness.pages.markup import markup
from harness.pages.table import problems
from harness.pages.units import difference, iec, interval_text, score_text, share_text, small

NUMBER, VERDICT, WORDS = "v", "t", "l"  # the first letter of a cell
_NAMED = 40  # points a line names
SPELLINGS = "spellings"  # of a manifest: how each point was asked for, which its command says


def not_discriminative(ranked: pd.DataFrame) -> str:
    """One note for the whole page: where the full cache scores at chance, so that nothing follows from equal scores."""
    panels = [panel for _, panel in ranked.groupby(list(GROUP), sort=False)]
    at_chance = [panel.iloc[0] for panel in panels if panel["discriminative"].eq(False).any()]
    if not at_chance:
        return ""
    names = "; ".join(f"{row['model']} on {row['task']} ({mode(row)}, {row['run_id']})" for row in at_chance)
    return (
        f'<p class="card warn"><b>Not discriminative, {len(at_chance)} of {len(panels)} panels:</b> the full cache scores at'
        f" chance in {names}. Equal scores there say nothing about the stacks.</p>"
    )


Panel = tuple[str, str, str, bool]


def facts(
    section: pd.DataFrame,
    volumes: Mapping[Panel, tuple[float | None, str | None]],
    families: Mapping[Panel, Mapping[str, float]],
) -> str:
    """One card a panel: what was found of smaller caches, how the full cache does, and how far each family of stacks gets."""
    cards = []
    for _, panel in section.groupby(list(GROUP), sort=False):
        row = panel.iloc[0]
        place = (row["run_id"], row["model"], row["task"], bool(row["query_aware"]))
        volume, missing = volumes[place]
        area = f"hypervolume {volume:.2f}" if volume is not None else f"no hypervolume: {missing}"
        own = ", ".join(f"{name} {value:.2f}" for name, value in families[place].items()) if len(families[place]) > 1 else ""
        area += f" ({own})" if own and volume is not None else ""
        warn = panel["discriminative"].eq(False).any()
        note = "<br><b>Not discriminative:</b> the full cache scores at chance." if warn else ""
        cards.append(
            f'<div class="card{" warn" if warn else ""}"><span class="quiet">{panel_title(panel, section)}</span>'
            f'<b class="big">{headline(panel)}</b><span class="quiet">{_base(panel)} · {area}{note}</span></div>'
        )
    return f'<div class="facts">{"".join(cards)}</div>'


def _base(panel: pd.DataFrame) -> str:
    base = panel[panel["stack"] == BASE]
    if base.empty or not base["n"].iloc[0]:
        return "no full-cache score"
    row = base.iloc[0]
    score = f"{score_text(row['score'])} {interval_text(row['score_lo'], row['score_hi'])}"
    return f"full cache {score} at {iec(row['bytes_context'])}, n = {row['n']}, chance {score_text(row['chance'])}"


def points_table(panel: pd.DataFrame, ident: str) -> tuple[str, list[list[str]], list[int]]:
    """(table, rows, ids) of all points, sortable by column; frontier rows are bold, a verdict says on hover what it means.

    The page's script fills the rows in; a row is its class and its cells, each a letter for what it is and its content.
    """
    faithful = bool(panel[list(FIDELITY)].notna().any(axis=None))
    ordered = rows_of(panel.sort_values(["bytes_context", "label"]))
    cells = [_cells(row, faithful) for row in ordered]
    rows = [_row(row, own) for row, own in zip(ordered, cells, strict=True)]
    return _table(ident, cells[0]), rows, [row["id"] for row in ordered]


def joint_table(entry: Mapping[str, Any], ident: str) -> tuple[str, list[list[str]]]:
    """(table, rows) of the points of a joint frontier, an entry of frontier.json as markup; as `points_table`."""
    cells = [
        {name: _words(text) if value is None else _number(value, text) for name, (value, text) in point.items()}
        for point in joint_cells(entry)
    ]
    points = zip(entry["points"], cells, strict=True)
    return _table(ident, cells[0]), [["front" if point["on_frontier"] else "", *own.values()] for point, own in points]


def _table(ident: str, cells: Mapping[str, str]) -> str:
    head = "".join(_head(name, cell) for name, cell in cells.items())
    return f'<div class="scroll"><table id="{ident}"><thead><tr>{head}</tr></thead><tbody></tbody></table></div>'


def _head(name: str, cell: str) -> str:
    left = "" if cell.startswith(NUMBER) else " class=l"
    return f'<th{left}><button type="button">{name}</button></th>'


def _cells(row: Row, faithful: bool) -> dict[str, str]:
    """The cells of a point by column name, the same names for all points of a panel."""
    base, bits, found = row["stack"] == BASE, row["effective_bits"], difference(row)
    alone, _, within = found.text.partition(" ")
    alone, nats = (f"{alone} nats", " nats") if found.in_nats else (alone, "")
    mean, end = (" (time mean)", "at the end") if is_stream(row) else ("", "end of answer")
    return {
        "stack and point": _words(row["label"]),
        "n": _number(row["n"], str(row["n"])),
        "score": _number(row["score"], score_text(row["score"])),
        "95 %": _words(interval_text(row["score_lo"], row["score_hi"])),
        "vs full": _number(found.value, "" if base else alone),
        "95 % paired": _words(within),
        "verdict": _verdict(row),
        "Holm p": _number(row["holm_p"], small(row["holm_p"])),
        "could see": _number(row["detectable"], small(row["detectable"]) + nats),
        f"KV bytes{mean}": _number(row["bytes_context"], iec(row["bytes_context"])),
        "of full": _number(row["ratio"], share_text(row["ratio"])),
        **(_fidelity(row) if faithful else {}),
        "logical, at the end" if mean else "logical": _number(row["bytes_logical"], iec(row["bytes_logical"])),
        "storage": _words(row["storage"]),
        end: _number(row["bytes_final"], iec(row["bytes_final"])),
        "highest peak": _number(row["bytes_peak"], iec(row["bytes_peak"])),
        "bits / value": _number(bits, f"{bits:.2f}" if math.isfinite(bits) else "–"),
        "frontier": _words("●" if row["on_frontier"] else ""),
        "chance of it": _number(row["p_frontier"], share_text(row["p_frontier"])),
        "notes": _words("; ".join(problems(row))),
    }


def _fidelity(row: Row) -> dict[str, str]:
    return {
        "KL to full": _number(row["kl_to_full"], small(row["kl_to_full"])),
        "top-1 agreement": _number(row["top1_agreement"], share_text(row["top1_agreement"])),
        "attention error": _number(row["attention_error"], small(row["attention_error"])),
        "nats / byte": _number(row["nll_per_byte"], score_text(row["nll_per_byte"])),
    }


def _row(row: Row, cells: dict[str, str]) -> list[str]:
    return ["base" if row["stack"] == BASE else "front" if row["on_frontier"] else "", *cells.values()]


def _words(text: str) -> str:
    return WORDS + text


def _verdict(row: Row) -> str:
    """The verdict; the script of the page gives the cell its meaning from the glossary."""
    return VERDICT + (glossary.verdict_text("base") if row["stack"] == BASE else glossary.judged(row))


def _number(value: float, text: str) -> str:
    return f"{NUMBER}{'' if math.isnan(value) else f'{value:.6g}'}|{text}"


def not_drawn(section: pd.DataFrame) -> str:
    """Every point or example that a figure of this section leaves out, by reason, with counts."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows_of(section):
        name = f"{row['label']} ({mode(row)})"
        for text in _absences(row):
            reasons[text].append(name)
    if not reasons:
        return '<p class="quiet">Nothing: every point and every example is drawn.</p>'
    items = "".join(
        f"<li><b>{len(names)} point{'s' * (len(names) > 1)}</b>: {text} <span class=quiet>{_list(names)}</span></li>"
        for text, names in reasons.items()
    )
    return f"<ul class=small>{items}</ul>"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more, in the notes of the table" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _absences(row: Row) -> Iterable[str]:
    left_out = row["left_out"]
    if pd.notna(left_out):
        absent = row["n"] == 0 or "finite" in left_out
        value = f" (score {score_text(row['score'])})" if math.isinf(row["score"]) else ""
        error = f" - {row['error']}" if row["n"] == 0 and pd.notna(row["error"]) else ""
        yield f"{'not drawn' if absent else 'drawn, not ranked'}: {left_out}{value}{error}"
    if row["bytes_context"] == 0:
        yield "zero bytes: only on the linear axis, a log axis has no zero"
    if not row["higher_is_better"] and row["score"] == 0:
        yield "score zero: only on the linear score axis"
    words = ("failed", "refused", "truncated", "unscored")
    counts = ", ".join(f"{row[f'n_{name}']} {name}" for name in words if row[f"n_{name}"]) if row["n"] else ""
    if counts:
        error = f" - {row['error']}" if pd.notna(row["error"]) else ""
        yield f"examples left out of the score: {counts}{error}"


def labels() -> str:
    """What every label means and whether its number may be trusted, folded away."""
    rows = "".join(
        f"<tr><td class=l>{section}</td><td class=l data-label>{markup(entry.printed)}</td>"
        f"<td class=l>{markup(entry.meaning)}</td><td class=l>{markup(entry.trust)}</td></tr>"
        for section, entry in glossary.entries()
    )
    head = "".join(f"<th class=l><button type=button>{name}</button></th>" for name in ("", "label", "meaning", "trust it?"))
    table = f'<table id="labels"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<details class="card"><summary>What the labels mean, and which numbers to trust</summary>{table}</details>'


def citations(found: Mapping[Entry, Sequence[str]], missing: Sequence[str]) -> str:
    """Whom to cite for the stacks and tasks of this page, and the same as BibTeX, folded away."""
    items = "".join(
        f"<li>{markup(entry.line)} <span class=quiet>{', '.join(map(markup, names))}</span></li>"
        for entry, names in found.items()
    )
    own = f"<p class=quiet>No entry for {', '.join(map(markup, missing))}: not of this program.</p>" if missing else ""
    text = "\n".join(map(markup, bibtex(found).splitlines()))
    title = "<summary>What to cite</summary>"
    return (
        f'<details class="card" id="citations">{title}<ul class=small>{items}</ul>{own}<pre id="bibtex">{text}</pre></details>'
    )


def made_with(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """What the manifests say, flattened, folded away."""
    blocks = []
    for run_id, manifest in manifests.items():
        said = {key: value for key, value in manifest.items() if key != SPELLINGS}
        pairs = "".join(f"<dt>{markup(key)}</dt><dd>{markup(value)}</dd>" for key, value in flat(said))
        blocks.append(f"<h3>{markup(run_id)}</h3><dl class=small>{pairs}</dl>")
    if not blocks:
        return ""
    title = "<summary>How this was made: versions, machine, configuration</summary>"
    return f'<details class="card">{title}{"".join(blocks)}</details>'
