"""The words of a page: facts, what is not drawn, what labels mean, how it was made; HTML from ranked tables of markup."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.frontier import GROUP
from harness.analysis.labels import mode
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.citations.bibliography import Entry, bibtex
from harness.pages import glossary
from harness.pages.figures import panel_title
from harness.pages.headline import headline
from harness.pages.hover import flat, is_stream
from harness.pages.markup import markup
from harness.pages.units import iec, interval_text, score_text

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
        area = "" if is_stream(row) else f" · {_area(*volumes[place], families[place])}"
        warn = panel["discriminative"].eq(False).any()
        note = "<br><b>Not discriminative:</b> the full cache scores at chance." if warn else ""
        cards.append(
            f'<div class="card{" warn" if warn else ""}"><span class="quiet">{panel_title(panel, section)}</span>'
            f'<b class="big">{headline(panel)}</b><span class="quiet">{_base(panel)}{area}{note}</span></div>'
        )
    return f'<div class="facts">{"".join(cards)}</div>'


def _area(volume: float | None, missing: str | None, families: Mapping[str, float]) -> str:
    """The hypervolume with what it measures; streams have none here: against a uniform guess it would count bytes alone."""
    if volume is None:
        return f"no hypervolume: {missing}"
    own = ", ".join(f"{name} {value:.2f}" for name, value in families.items()) if len(families) > 1 else ""
    meaning = "saving in powers of two, times the share of the score above chance that is kept; more is better"
    return f'<span title="{meaning}">hypervolume {volume:.2f}</span>{f" (of each family alone: {own})" if own else ""}'


def _base(panel: pd.DataFrame) -> str:
    base = panel[panel["stack"] == BASE]
    if base.empty or not base["n"].iloc[0]:
        return "no full-cache score"
    row = base.iloc[0]
    score = f"{score_text(row['score'])} {interval_text(row['score_lo'], row['score_hi'])}"
    return f"full cache {score} at {iec(row['bytes_context'])}, n = {row['n']}, chance {score_text(row['chance'])}"


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


def _linked(entry: Entry) -> str:
    """An entry's line, its arXiv number a link to the paper, which the page itself never asks for."""
    line, number = markup(entry.line), markup(entry.fields.get("eprint", ""))
    if not number:
        return line
    return line.replace(f"arXiv:{number}", f'<a href="https://arxiv.org/abs/{number}" rel="noreferrer">arXiv:{number}</a>')


def citations(found: Mapping[Entry, Sequence[str]], missing: Sequence[str]) -> str:
    """Whom to cite for the stacks and tasks of this page, and the same as BibTeX, folded away."""
    items = "".join(
        f"<li>{_linked(entry)} <span class=quiet>{', '.join(map(markup, names))}</span></li>" for entry, names in found.items()
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
