"""The cards of a page: each a title, controls, a note and a figure or a table, of one section, one panel or all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.analysis.curves import Curves
from harness.analysis.frontier import GROUP
from harness.analysis.point_row import BASE
from harness.analysis.points import rows_of
from harness.pages import figures
from harness.pages import paired_view as by_pairs
from harness.pages import place_figures as by_place
from harness.pages.frame import only_in, select_options, switch
from harness.pages.frontier_figure import frontier as frontier_figure
from harness.pages.frontier_figure import views
from harness.pages.headline import said
from harness.pages.hover import is_stream
from harness.pages.looks import Look
from harness.pages.markup import markup
from harness.pages.place_figures import heat
from harness.pages.words import together
from harness.pages.words.page_tables import joint_table, points_table
from harness.pages.words.together import Together

Panel = tuple[str, str, str, bool]  # the values of GROUP

_LEGEND = (
    "Large, outlined points are on the frontier: no other point scores better for as few bytes. Lighter points are "
    "beaten, not dropped. Bars are 95 % intervals; the dotted line and its band are the full cache. Points of one stack are "
    "joined by a thin line; the two modes are never joined. Click a point for all that is known of it, or for a list where "
    "several lie in one place (+2: two more there)."
)
_CURVES = (
    "exp of the mean negative log-likelihood of the tokens in a bucket, over all documents. Every stack shows its point at the "
    "chosen budget, or, without one there, that which keeps the nearest share of tokens; stacks without a budget always show. "
    "Larger markers keep more."
)
_BITS = (
    "the best of the stacks that store every token in so many bits of a key and of a value; scales and exact tails are in the "
    "share of bytes. Hover for all of them"
)
_JOINT = (
    "each result with its own bytes, in its own unit, paired with the full cache; nothing is averaged, and rows are by bytes. "
    "On the frontier: no other point needs no more bytes, does no worse on every one of them, and is better in one"
)
_MEAN = (
    "scores between a guess (0) and the full cache (1), their mean, over the geometric mean of the shares of bytes; bars reach "
    "down to the worst. Only points that all have, and only where the full cache is better than chance"
)
_NAMED = 12  # points that a note names
_EXPORTS = {"csv": "CSV", "latex": "LaTeX", "markdown": "Markdown"}


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the cards of a page share; all texts are markup. `content` gathers what the script of the page reads."""

    cells: pd.DataFrame
    curves: Curves
    volumes: Mapping[Panel, tuple[float | None, str | None]]  # hypervolume, or why there is none
    families: Mapping[Panel, Mapping[str, float]]  # hypervolume of the points of each family of stacks
    looks: dict[str, Look]
    content: dict[str, Any] = field(
        default_factory=lambda: {
            name: {} for name in ("figures", "heat", "titles", "views", "shown", "windows", "tables", "rows", "maps")
        }
    )


def card(title: str, inner: str, note: str = "", controls: Iterable[str] = ()) -> str:
    """A card as HTML, all of it markup."""
    quiet = f'<p class="quiet small">{note}</p>' if note else ""
    right = f'<div class="switches">{"".join(controls)}</div>'
    return f'<div class="card"><div class="head"><h3>{title}</h3>{right}</div>{quiet}{inner}</div>'


def _plot(page: Page, ident: str, figure: Any, unit: str = "", view: str = "") -> str:
    """The element of a figure; with a unit of its x axis ("bytes", "ratio" or "tokens") the page writes its ticks.

    A figure with a `view` opens in it.
    """
    page.content["figures"][ident] = figure.to_plotly_json()
    return f'<div id="{ident}"{f" data-unit={unit}" if unit else ""}{f" data-view={view}" if view else ""}></div>'


def frontier_card(page: Page, ident: str, section: pd.DataFrame) -> str:
    """Score, or the paired difference, against bytes."""
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
    hollow = by_pairs.HOLLOW if (section["storage"] == "simulated").any() else ""
    note = _LEGEND + hollow
    if paired is not None:
        controls.insert(0, switch(ident, "view", {"score": "score", "paired": "vs full (paired)"}, view))
        page.content["views"][ident] = views(figure, paired)
        note = only_in(ident, "score", view, note) + only_in(ident, "paired", view, by_pairs.note(section, paired))
    page.content["titles"][ident] = figures.x_titles(section)
    inner = _plot(page, ident, figure, "bytes", view if paired is not None else "")
    return card("Quality against KV bytes", inner, note, controls)


def heat_card(page: Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """Scores by length and depth, of the full cache and of a point; empty where examples have no such place.

    It opens at the point that the headline of the panel names, else at the first of the frontier.
    """
    own = page.cells
    for name in GROUP:
        own = own[own[name] == panel[name].iloc[0]]
    if own.empty:
        return ""
    shown = panel[panel["label"].isin(own["label"])].sort_values("bytes_context")
    front = shown["on_frontier"] & (shown["stack"] != BASE)
    groups = {"on the frontier": shown[front], "others": shown[~front]}
    ordered = [row for points in groups.values() for row in rows_of(points)]
    best = said(panel).label
    chosen = next((row for row in ordered if row["label"] == best), ordered[0])
    options = "".join(
        f'<optgroup label="{name}">{select_options(points["short"].tolist(), chosen["short"])}</optgroup>'
        for name, points in groups.items()
    )
    figure, maps = heat(own, chosen["label"], chosen["short"])
    page.content["heat"][ident] = [{"label": row["short"], **maps[row["label"]]} for row in ordered]
    page.content["maps"][ident] = [row["id"] for row in ordered]
    select = f'<label>compare with <select data-plot="{ident}">{options}</select></label>'
    floor = ". †: the full cache scores at chance there" if own["discriminative"].eq(False).any() else ""
    note = f"mean score of a cell; hover for n and interval{floor}"
    first = panel.iloc[0]
    title = f"{first['task']}: {first['metric']} by length and depth, {figures.panel_title(panel, section)}"
    return card(title, _plot(page, ident, figure), note, [select])


def curves_card(page: Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """Perplexity by position; empty for tasks that are no streams."""
    if not is_stream(panel.iloc[0]):
        return ""
    title = f"Perplexity by position, {figures.panel_title(panel, section)}"
    missing = "".join(f"<br>{markup(line)}" for line in page.curves.problems)
    lines = by_place.of_panel(page.curves.frame, panel)
    if not lines:
        return card(title, f'<p class="quiet">No curve to draw.{missing}</p>')
    shown, first = by_place.budgets(lines)
    page.content["shown"][ident], page.content["titles"][ident] = list(shown.values()), by_place.Y_TITLES
    options = select_options(list(shown), first)
    controls = [
        f'<label>budget <select data-lines="{ident}">{options}</select></label>',
        switch(ident, "measure", {"perplexity": "perplexity", "kl": "KL to full"}),
        switch(ident, "yscale", {"log": "log", "linear": "linear"}),
    ]
    width = int((lines[0][1]["stop"] - lines[0][1]["start"]).iloc[0])
    more = by_place.other_shares(lines)
    kept = f"<br>Tokens kept at the end, where a name says otherwise: {', '.join(more)}." if 0 < len(more) <= _NAMED else ""
    note = f"{_CURVES} Buckets of {width} tokens.{kept}{missing}"
    figure = by_place.by_position(lines, page.looks, shown[first])
    return card(title, _plot(page, ident, figure, "tokens"), note, controls)


def bits_card(page: Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """Bits of keys against bits of values; empty where stacks do not differ in both."""
    figure = figures.bits_map(panel)
    if figure is None:
        return ""
    title = f"Bits of keys and of values, {figures.panel_title(panel, section)}"
    return card(title, _plot(page, ident, figure), _BITS)


def bytes_card(page: Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """What the bytes of each point are."""
    when = " at the end of the stream" if is_stream(panel.iloc[0]) else ""
    note = f"allocated bytes by kind{when}, mean over the samples; the marker of the stack is at the logical bytes"
    figure, windows = figures.breakdown(panel, page.looks)
    controls = []
    if len(windows) > 1:
        page.content["windows"][ident] = [list(window) for window in windows.values()]
        controls.append(f'<label>points by bytes <select data-rows="{ident}">{select_options(list(windows))}</select></label>')
    title = f"What the bytes are, {figures.panel_title(panel, section)}"
    return card(title, f'<div class="scroll">{_plot(page, ident, figure, "bytes")}</div>', note, controls)


def table_card(page: Page, ident: str, panel: pd.DataFrame, section: pd.DataFrame) -> str:
    """All points of a panel, to search, sort and take along."""
    table, page.content["tables"][ident], page.content["rows"][ident] = points_table(panel, ident)
    note = "click a column to sort, a row (or arrows and enter) for all that is known of a point"
    return card(f"All points, {figures.panel_title(panel, section)}", table, note, _table_tools(ident))


def _table_tools(ident: str) -> list[str]:
    buttons = "".join(f'<button type="button" value="{value}">{name}</button>' for value, name in _EXPORTS.items())
    search = f'<input type="search" data-search="{ident}" placeholder="search" aria-label="search this table">'
    return [search, f'<span class="buttons" role="group" data-export="{ident}">{buttons}</span>']


def joint_card(page: Page, ident: str, found: Together) -> str:
    """Several tasks or models together, as markup; a figure for each mode in which points have one score."""
    table, page.content["tables"][ident + "-points"] = joint_table(found, ident + "-points")
    page.content["rows"][ident + "-points"] = [[row["id"] for row in arm.values()] for arm in found.arms]  # opens the first
    places = {together.arm_key(arm): [row["id"] for row in arm.values()] for arm in found.arms}
    drawn = [
        _plot(page, f"{ident}-mean{i}", figures.joint(entry["points"], page.looks, places), "ratio")
        for i, entry in enumerate(found.means)
    ]
    modes = ["question seen" if entry["query_aware"] else "question unseen" for entry in found.means]
    means = "".join(f"<p class=quiet>{mode}: {_MEAN}</p>{figure}" for mode, figure in zip(modes, drawn, strict=True))
    inner = f'<b class="big">{together.headline(found)}</b>{table}{means}'
    return card(found.title, inner, _JOINT, _table_tools(ident + "-points"))


def sides_card() -> str:
    """Two panels side by side, which the page's script fills in once it is unfolded."""
    selects = "".join(f"<label>{side} <select data-side={side}></select></label>" for side in ("left", "right"))
    return (
        '<details class="card" id="sides"><summary>Two runs or modes side by side</summary>'
        f'<div class="switches">{selects}</div><p class="quiet small" id="sides-note"></p><div id="sides-plot"></div>'
        f'<div class="scroll"><table id="sides-table"><thead></thead><tbody></tbody></table></div></details>'
    )
