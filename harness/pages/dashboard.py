"""One self-contained page from the findings of one or several runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.curves import Curves
from harness.analysis.findings import Findings
from harness.analysis.frontier import GROUP
from harness.analysis.labels import shortened, with_settings
from harness.analysis.point_row import BASE
from harness.analysis.points import rows_of
from harness.errors import UserError
from harness.pages import curve_figure as by_position
from harness.pages import facts as html
from harness.pages import figures
from harness.pages import paired_view as by_pairs
from harness.pages.depth_map import heat
from harness.pages.frame import only_in, render, select_options, switch
from harness.pages.frontier_figure import frontier as frontier_figure
from harness.pages.frontier_figure import views
from harness.pages.hover import hover, is_stream
from harness.pages.looks import Look, looks
from harness.pages.markup import as_markup, markup
from harness.records.atomic import replace

Panel = tuple[str, str, str, bool]  # the values of GROUP

TITLE = "What each byte of KV cache buys"
_LEGEND = (
    "Large, outlined points are on the frontier: no other point scores better for as few bytes. Lighter points are "
    "beaten, not dropped. Bars are 95 % intervals; the dotted line and its band are the full cache. Hollow markers: "
    "simulated storage. Points of one stack are joined by a thin line; the two modes are never joined."
)

_CURVES = (
    "exp of the mean negative log-likelihood of the tokens in a bucket, over all documents. Every stack shows its point "
    "nearest to the chosen budget, by the share of tokens kept; stacks without a budget always show. Larger markers keep more."
)


@dataclass(frozen=True, kw_only=True)
class _Page:
    """What the sections of a page share; all texts are markup. `content` gathers what the script of the page reads."""

    cells: pd.DataFrame
    curves: Curves
    volumes: Mapping[Panel, tuple[float | None, str | None]]  # hypervolume, or why there is none
    looks: dict[str, Look]
    content: dict[str, Any]


def write(found: Findings, path: Path, manifests: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the page: a section for each model and task, a panel for each run and mode in it.

    Args:
        found: What the records of one or several runs amount to.
        path: File to write; it appears whole or not at all.
        manifests: What to say about how a run was made, by run_id.

    Raises:
        UserError: there are no records.
    """
    if found.points.empty:
        raise UserError("there are no records to draw")
    ranked = _with_hover(found.points)
    page = _Page(
        cells=as_markup(found.cells),
        curves=Curves(frame=as_markup(found.curves.frame), problems=found.curves.problems),
        volumes={_panel(group): (group["hypervolume"], group["hypervolume_missing"]) for group in found.frontier["groups"]},
        looks=looks(ranked["stack"], BASE),
        content={"figures": {}, "heat": {}, "titles": {}, "views": {}, "shown": {}, "windows": {}, "tables": {}},
    )
    parts = ranked.groupby(["model", "task"], sort=False)
    sections = [_section(page, f"s{i}", _shortly(section)) for i, (_, section) in enumerate(parts)]
    body = _header(ranked) + html.not_discriminative(ranked) + "".join(sections)
    body += html.labels() + html.made_with(manifests or {})
    text = render(f"{TITLE} · {', '.join(ranked['model'].unique())}", body, page.content)
    replace(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def _panel(group: Mapping[str, Any]) -> Panel:
    """The panel of an entry of frontier.json, as a table of markup names it."""
    return markup(group["run_id"]), markup(group["model"]), markup(group["task"]), group["query_aware"]


def drawable(points: pd.DataFrame) -> pd.DataFrame:
    """The points of one model and task as the figures of a page take them: texts as markup, hover lines, short names."""
    return _shortly(_with_hover(points))


def _with_hover(points: pd.DataFrame) -> pd.DataFrame:
    ranked = as_markup(points)
    ranked["about"] = [hover(row) for row in rows_of(ranked)]
    return ranked


def _shortly(section: pd.DataFrame) -> pd.DataFrame:
    """The section with `short_stack` and `short`, the names that its figures use: what tells a stack from its siblings."""
    names = shortened(section["stack"].unique())
    pairs = zip(section["stack"], section["label"], strict=True)
    settings = [(stack, label.removeprefix(stack).removeprefix(" at").strip()) for stack, label in pairs]
    short = [with_settings(names[stack], words) for stack, words in settings]
    named = section.assign(short_stack=section["stack"].map(names), short=short)
    alike = bool(named.duplicated([*GROUP, "attn", "short"]).any())
    return named.assign(short_stack=section["stack"], short=section["label"]) if alike else named


def _header(ranked: pd.DataFrame) -> str:
    pairs = ranked.groupby(["model", "task"], sort=False)
    names = " · ".join(f"<b>{model}</b> on {task}" for (model, task), _ in pairs)
    stacks = ranked.loc[ranked["stack"] != BASE, "stack"].nunique()
    return (
        f"<h1>{TITLE}</h1><p class=quiet>{names} · {len(ranked)} points of {stacks} compression stacks and the full"
        f" cache · runs {', '.join(ranked['run_id'].unique())}</p>"
    )


def _section(page: _Page, ident: str, section: pd.DataFrame) -> str:
    first = section.iloc[0]
    better = "higher" if first["higher_is_better"] else "lower"
    seeds = ", ".join(dict.fromkeys(section["seeds"]))
    counts = sorted(set(section.loc[section["n"] > 0, "n"]))
    spread = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
    panels = [panel for _, panel in section.groupby(list(GROUP), sort=False)]
    parts = [
        f"<section><h2>{first['model']} · {first['task']}</h2>",
        f"<p class=quiet>{first['metric']}, {better} is better · n = {spread} a point · seed {seeds}</p>",
        html.facts(section, page.volumes),
        _frontier_card(page, f"{ident}-frontier", section),
    ]
    parts += [_curves_card(page, f"{ident}-curves{i}", panel, section) for i, panel in enumerate(panels)]
    parts += [_heat_card(page, f"{ident}-heat{i}", panel, section) for i, panel in enumerate(panels)]
    parts += [_bytes_card(page, f"{ident}-bytes{i}", panel, section) for i, panel in enumerate(panels)]
    parts += [_table_card(page, f"{ident}-points{i}", panel, section) for i, panel in enumerate(panels)]
    parts.append(_card("Not drawn or not ranked", html.not_drawn(section)))
    return "".join(parts) + "</section>"


def _card(title: str, inner: str, note: str = "", controls: Iterable[str] = ()) -> str:
    quiet = f'<p class="quiet small">{note}</p>' if note else ""
    right = f'<div class="switches">{"".join(controls)}</div>'
    return f'<div class="card"><div class="head"><h3>{title}</h3>{right}</div>{quiet}{inner}</div>'


def _plot(page: _Page, ident: str, figure: Any, unit: str = "", view: str = "") -> str:
    """The element of a figure; with a unit of its x axis ("bytes" or "tokens") the page writes its ticks.

    A figure with a `view` opens in it.
    """
    page.content["figures"][ident] = figure.to_plotly_json()
    return f'<div id="{ident}"{f" data-unit={unit}" if unit else ""}{f" data-view={view}" if view else ""}></div>'


def _frontier_card(page: _Page, ident: str, section: pd.DataFrame) -> str:
    paired = by_pairs.of_section(section)
    view = "paired" if paired is not None and is_stream(section.iloc[0]) else "score"
    controls = [
        switch(ident, "unit", {"bytes": "bytes", "ratio": "share of full"}),
        switch(ident, "xscale", {"log": "log", "linear": "linear"}),
    ]
    if not section["higher_is_better"].iloc[0]:
        scale = switch(ident, "yscale", {"log": "score log", "linear": "score linear"})
        controls.append(only_in(ident, "score", view, scale))
    figure = frontier_figure(section, page.looks, paired)
    note = _LEGEND
    if paired is not None:
        controls.insert(0, switch(ident, "view", {"score": "score", "paired": "vs full (paired)"}, view))
        page.content["views"][ident] = views(figure, paired)
        note = only_in(ident, "score", view, _LEGEND) + only_in(ident, "paired", view, by_pairs.note(section, paired))
    page.content["titles"][ident] = figures.x_titles(section)
    inner = _plot(page, ident, figure, "bytes", view if paired is not None else "")
    return _card("Quality against KV bytes", inner, note, controls)


def _heat_card(page: _Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    own = page.cells
    for name in GROUP:
        own = own[own[name] == panel[name].iloc[0]]
    if own.empty:
        return ""
    shown = panel[panel["label"].isin(own["label"])].sort_values("bytes_context")
    front = shown["on_frontier"] & (shown["stack"] != BASE)
    groups = {"on the frontier": shown[front], "others": shown[~front]}
    options = "".join(
        f'<optgroup label="{name}">{select_options(points["short"].tolist())}</optgroup>' for name, points in groups.items()
    )
    ordered = [row for points in groups.values() for row in rows_of(points)]
    figure, maps = heat(own, ordered[0]["label"], ordered[0]["short"])
    page.content["heat"][ident] = [{"label": row["short"], **maps[row["label"]]} for row in ordered]
    select = f'<label>compare with <select data-plot="{ident}">{options}</select></label>'
    note = "mean score of a cell; hover for n and interval. †: the full cache scores at chance there"
    first = panel.iloc[0]
    title = f"{first['task']}: {first['metric']} by length and depth, {figures.panel_title(panel, section)}"
    return _card(title, _plot(page, ident, figure), note, [select])


def _curves_card(page: _Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    if not is_stream(panel.iloc[0]):
        return ""
    title = f"Perplexity by position, {figures.panel_title(panel, section)}"
    missing = "".join(f"<br>{markup(line)}" for line in page.curves.problems)
    lines = by_position.of_panel(page.curves.frame, panel)
    if not lines:
        return _card(title, f'<p class="quiet">No curve to draw.{missing}</p>')
    shown, first = by_position.budgets(lines)
    page.content["shown"][ident], page.content["titles"][ident] = list(shown.values()), by_position.Y_TITLES
    options = select_options(list(shown), first)
    controls = [
        f'<label>budget <select data-lines="{ident}">{options}</select></label>',
        switch(ident, "measure", {"perplexity": "perplexity", "kl": "KL to full"}),
        switch(ident, "yscale", {"log": "log", "linear": "linear"}),
    ]
    width = int((lines[0][1]["stop"] - lines[0][1]["start"]).iloc[0])
    note = f"{_CURVES} Buckets of {width} tokens.{missing}"
    figure = by_position.by_position(lines, page.looks, shown[first])
    return _card(title, _plot(page, ident, figure, "tokens"), note, controls)


def _table_card(page: _Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    table, page.content["tables"][ident] = html.points_table(panel, ident)
    return _card(f"All points, {figures.panel_title(panel, section)}", table, "click a column to sort")


def _bytes_card(page: _Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    when = " at the end of the stream" if is_stream(panel.iloc[0]) else ""
    note = f"allocated bytes by kind{when}, mean over the samples; the marker of the stack is at the logical bytes"
    figure, windows = figures.breakdown(panel, page.looks)
    controls = []
    if len(windows) > 1:
        page.content["windows"][ident] = [list(window) for window in windows.values()]
        controls.append(f'<label>points by bytes <select data-rows="{ident}">{select_options(list(windows))}</select></label>')
    title = f"What the bytes are, {figures.panel_title(panel, section)}"
    return _card(title, f'<div class="scroll">{_plot(page, ident, figure, "bytes")}</div>', note, controls)
