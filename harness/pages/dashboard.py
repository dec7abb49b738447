"""One self-contained page from the records of one or several runs; it computes no score and draws no figure itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.curves import Curves
from harness.analysis.frontier import GROUP, frontier, rank
from harness.analysis.point_row import BASE
from harness.analysis.points import cells, points
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
from harness.pages.rows import rows_of
from harness.records.atomic import replace

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


def write(
    records: Sequence[Mapping[str, Any]],
    path: Path,
    manifests: Mapping[str, Mapping[str, Any]] | None = None,
    curves: Curves | None = None,
    ranked: pd.DataFrame | None = None,
) -> None:
    """Write the page: a section for each model and task, a panel for each run and mode in it.

    Args:
        records: Records of one or several runs, as dicts.
        path: File to write; it appears whole or not at all.
        manifests: What to say about how a run was made, by run_id.
        curves: Perplexity by position of the stream runs among the records.
        ranked: The ranked points of the same records, where they are known already.

    Raises:
        UserError: there are no records.
    """
    if not records:
        raise UserError("there are no records to draw")
    ranked = as_markup(rank(points(records)) if ranked is None else ranked)
    ranked["about"] = [hover(row) for row in rows_of(ranked)]
    if curves is not None:
        curves = Curves(frame=as_markup(curves.frame), problems=curves.problems)
    table = looks(ranked["stack"], BASE)
    content: dict[str, Any] = {"figures": {}, "heat": {}, "titles": {}, "views": {}, "shown": {}, "windows": {}}
    grid = as_markup(cells(records))
    sections = [
        _section(f"s{i}", section, grid, table, content, curves)
        for i, (_, section) in enumerate(ranked.groupby(["model", "task"], sort=False))
    ]
    body = _header(ranked) + html.not_discriminative(ranked) + "".join(sections)
    body += html.labels() + html.made_with(manifests or {})
    page = render(f"{TITLE} · {', '.join(ranked['model'].unique())}", body, content)
    replace(path, lambda draft: draft.write_text(page, encoding="utf-8"))


def _header(ranked: pd.DataFrame) -> str:
    pairs = ranked.groupby(["model", "task"], sort=False)
    names = " · ".join(f"<b>{model}</b> on {task}" for (model, task), _ in pairs)
    stacks = ranked.loc[ranked["stack"] != BASE, "stack"].nunique()
    return (
        f"<h1>{TITLE}</h1><p class=quiet>{names} · {len(ranked)} points of {stacks} compression stacks and the full"
        f" cache · runs {', '.join(ranked['run_id'].unique())}</p>"
    )


def _section(
    ident: str,
    section: pd.DataFrame,
    grid: pd.DataFrame,
    table: dict[str, Look],
    content: dict[str, Any],
    curves: Curves | None,
) -> str:
    first = section.iloc[0]
    better = "higher" if first["higher_is_better"] else "lower"
    seeds = ", ".join(dict.fromkeys(section["seeds"]))
    counts = sorted(set(section.loc[section["n"] > 0, "n"]))
    spread = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
    volumes = {
        (group["run_id"], group["query_aware"]): (group["hypervolume"], group["hypervolume_missing"])
        for group in frontier(section)["groups"]
    }
    parts = [
        f"<section><h2>{first['model']} · {first['task']}</h2>",
        f"<p class=quiet>{first['metric']}, {better} is better · n = {spread} a point · seed {seeds}</p>",
        html.facts(section, volumes),
        _frontier_card(f"{ident}-frontier", section, table, content),
    ]
    panels = [panel for _, panel in section.groupby(list(GROUP), sort=False)]
    if curves is not None:
        cards = (_curves_card(f"{ident}-curves{i}", panel, section, table, content, curves) for i, panel in enumerate(panels))
        parts += cards
    parts += [_heat_card(f"{ident}-heat{i}", panel, section, grid, content) for i, panel in enumerate(panels)]
    parts += [_bytes_card(f"{ident}-bytes{i}", panel, section, table, content) for i, panel in enumerate(panels)]
    parts += [
        _card(f"All points, {figures.panel_title(panel, section)}", html.points_table(panel), "click a column to sort")
        for panel in panels
    ]
    parts.append(_card("Not drawn or not ranked", html.not_drawn(section)))
    return "".join(parts) + "</section>"


def _card(title: str, inner: str, note: str = "", controls: Iterable[str] = ()) -> str:
    quiet = f'<p class="quiet small">{note}</p>' if note else ""
    right = f'<div class="switches">{"".join(controls)}</div>'
    return f'<div class="card"><div class="head"><h3>{title}</h3>{right}</div>{quiet}{inner}</div>'


def _plot(ident: str, figure: Any, content: dict[str, Any], unit: str = "", view: str = "") -> str:
    """The element of a figure; with a unit of its x axis ("bytes" or "tokens") the page writes its ticks.

    A figure with a `view` opens in it.
    """
    content["figures"][ident] = figure.to_plotly_json()
    return f'<div id="{ident}"{f" data-unit={unit}" if unit else ""}{f" data-view={view}" if view else ""}></div>'


def _frontier_card(ident: str, section: pd.DataFrame, table: dict[str, Look], content: dict[str, Any]) -> str:
    paired = by_pairs.of_section(section)
    view = "paired" if paired is not None and is_stream(section.iloc[0]) else "score"
    controls = [
        switch(ident, "unit", {"bytes": "bytes", "ratio": "share of full"}),
        switch(ident, "xscale", {"log": "log", "linear": "linear"}),
    ]
    if not section["higher_is_better"].iloc[0]:
        scale = switch(ident, "yscale", {"log": "score log", "linear": "score linear"})
        controls.append(only_in(ident, "score", view, scale))
    figure = frontier_figure(section, table, paired)
    note = _LEGEND
    if paired is not None:
        controls.insert(0, switch(ident, "view", {"score": "score", "paired": "vs full (paired)"}, view))
        content["views"][ident] = views(figure, paired)
        note = only_in(ident, "score", view, _LEGEND) + only_in(ident, "paired", view, by_pairs.note(section, paired))
    content["titles"][ident] = figures.x_titles(section)
    inner = _plot(ident, figure, content, "bytes", view if paired is not None else "")
    return _card("Quality against KV bytes", inner, note, controls)


def _heat_card(ident: str, panel: pd.DataFrame, section: pd.DataFrame, grid: pd.DataFrame, content: dict[str, Any]) -> str:
    own = grid
    for name in GROUP:
        own = own[own[name] == panel[name].iloc[0]]
    if own.empty:
        return ""
    shown = panel[panel["label"].isin(own["label"])].sort_values("bytes_context")
    front = shown["on_frontier"] & (shown["stack"] != BASE)
    groups = {"on the frontier": shown.loc[front, "label"].tolist(), "others": shown.loc[~front, "label"].tolist()}
    options = "".join(f'<optgroup label="{name}">{select_options(labels)}</optgroup>' for name, labels in groups.items())
    ordered = [label for labels in groups.values() for label in labels]
    figure, maps = heat(own, ordered[0])
    content["heat"][ident] = [{"label": label, **maps[label]} for label in ordered]
    select = f'<label>compare with <select data-plot="{ident}">{options}</select></label>'
    note = "mean score of a cell; hover for n and interval. †: the full cache scores at chance there"
    first = panel.iloc[0]
    title = f"{first['task']}: {first['metric']} by length and depth, {figures.panel_title(panel, section)}"
    return _card(title, _plot(ident, figure, content), note, [select])


def _curves_card(
    ident: str,
    panel: pd.DataFrame,
    section: pd.DataFrame,
    table: dict[str, Look],
    content: dict[str, Any],
    curves: Curves,
) -> str:
    if not is_stream(panel.iloc[0]):
        return ""
    title = f"Perplexity by position, {figures.panel_title(panel, section)}"
    missing = "".join(f"<br>{markup(line)}" for line in curves.problems)
    lines = by_position.of_panel(curves.frame, panel)
    if not lines:
        return _card(title, f'<p class="quiet">No curve to draw.{missing}</p>')
    shown, first = by_position.budgets(lines)
    content["shown"][ident], content["titles"][ident] = list(shown.values()), by_position.Y_TITLES
    options = select_options(list(shown), first)
    controls = [
        f'<label>budget <select data-lines="{ident}">{options}</select></label>',
        switch(ident, "measure", {"perplexity": "perplexity", "kl": "KL to full"}),
        switch(ident, "yscale", {"log": "log", "linear": "linear"}),
    ]
    width = int((lines[0][1]["stop"] - lines[0][1]["start"]).iloc[0])
    note = f"{_CURVES} Buckets of {width} tokens.{missing}"
    return _card(title, _plot(ident, by_position.by_position(lines, table, shown[first]), content, "tokens"), note, controls)


def _bytes_card(ident: str, panel: pd.DataFrame, section: pd.DataFrame, table: dict[str, Look], content: dict[str, Any]) -> str:
    when = " at the end of the stream" if is_stream(panel.iloc[0]) else ""
    note = f"allocated bytes by kind{when}, mean over the samples; the marker of the stack stands at the logical bytes"
    figure, windows = figures.breakdown(panel, table)
    controls = []
    if len(windows) > 1:
        content["windows"][ident] = [list(window) for window in windows.values()]
        controls.append(f'<label>points by bytes <select data-rows="{ident}">{select_options(list(windows))}</select></label>')
    title = f"What the bytes are, {figures.panel_title(panel, section)}"
    return _card(title, f'<div class="scroll">{_plot(ident, figure, content, "bytes")}</div>', note, controls)
