"""One self-contained page from the findings of one or several runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.contrast import Flips
from harness.analysis.curves import Curves
from harness.analysis.findings import Findings
from harness.analysis.frontier import GROUP
from harness.analysis.labels import family_of, mode, shortened, with_settings
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.citations.bibliography import cited, unknown
from harness.errors import UserError
from harness.pages import cards
from harness.pages import facts as html
from harness.pages.cards import Page, Panel
from harness.pages.frame import render
from harness.pages.frontier_figure import CROWDED
from harness.pages.hover import about, hover, is_stream
from harness.pages.looks import looks
from harness.pages.markup import DATA, as_markup, markup, one_line
from harness.pages.words.looking import looking_at
from harness.pages.words.point_command import command
from harness.pages.words.together import together
from harness.records.atomic import replace

TITLE = "What each byte of KV cache buys"
_SIZES = {"bytes": "bytes_context", "full": "bytes_full", "peak": "bytes_peak_most"}
_NUMBERS = {"score": "score", "low": "score_lo", "high": "score_hi", "over": "peak_ratio", **_SIZES}


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
    groups = {_panel(group): group for group in found.frontier["groups"]}
    page = Page(
        cells=as_markup(found.cells),
        curves=Curves(frame=as_markup(found.curves.frame), problems=found.curves.problems),
        volumes={panel: (group["hypervolume"], group["hypervolume_missing"]) for panel, group in groups.items()},
        families={panel: group["hypervolume_by_family"] for panel, group in groups.items()},
        looks=looks(ranked["stack"], BASE),
    )
    parts = ranked.groupby(["model", "task"], sort=False)
    sections = [_section(page, f"s{i}", _shortly(section)) for i, (_, section) in enumerate(parts)]
    side_by_side = together(ranked, map(_as_markup, found.frontier["joint"]))
    joint = [cards.joint_card(page, f"j{i}", one) for i, one in enumerate(side_by_side)]
    sides = [cards.sides_card()] if ranked.groupby(list(GROUP)).ngroups > 1 else []
    page.content.update(_explored(found, ranked["about"].tolist(), manifests or {}))
    seen = looking_at(ranked, page.cells, manifests or {})
    body = _header(ranked) + seen + html.not_discriminative(ranked) + "".join([*joint, *sections, *sides])
    stacks, tasks = ([str(name) for name in found.points[column].unique()] for column in ("stack", "task"))
    body += html.citations(cited(stacks, tasks), unknown(stacks, tasks)) + html.labels() + html.made_with(manifests or {})
    text = render(f"{TITLE} · {', '.join(ranked['model'].unique())}", body, page.content)
    replace(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def _panel(group: Mapping[str, Any]) -> Panel:
    """The panel of an entry of frontier.json, as a table of markup names it."""
    return markup(group["run_id"]), markup(group["model"]), markup(group["task"]), group["query_aware"]


def _as_markup(value: Any) -> Any:
    """The value with every text and key in it as markup; JSON in it stays as it is, as in the tables."""
    if isinstance(value, Mapping):
        return {markup(key): one if key in DATA else _as_markup(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_markup(one) for one in value]
    return markup(value) if isinstance(value, str) else value


def drawable(points: pd.DataFrame) -> pd.DataFrame:
    """The points of one model and task as the figures of a page take them: texts as markup, hover lines, short names."""
    return _shortly(_with_hover(points))


def _with_hover(points: pd.DataFrame) -> pd.DataFrame:
    """The points as markup with `hover` and `about`, what they say of themselves, and `id`, their place in the table."""
    ranked = as_markup(points)
    rows = rows_of(ranked)
    return ranked.assign(hover=list(map(hover, rows)), about=list(map(about, rows)), id=range(len(ranked)))


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
        '<div id="filters" class="card" role="search" aria-label="filters"></div>'
    )


def _section(page: Page, ident: str, section: pd.DataFrame) -> str:
    first = section.iloc[0]
    better = "higher" if first["higher_is_better"] else "lower"
    seeds = ", ".join(dict.fromkeys(section["seeds"]))
    counts = sorted(set(section.loc[section["n"] > 0, "n"]))
    spread = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
    panels = [panel for _, panel in section.groupby(list(GROUP), sort=False)]
    parts = [
        f'<section id="{ident}"><h2>{first["model"]} · {first["task"]}</h2>',
        f"<p class=quiet>{first['metric']}, {better} is better · n = {spread} a point · seed {seeds}</p>",
        html.facts(section, page.volumes, page.families),
        cards.frontier_card(page, f"{ident}-frontier", section),
    ]
    for name, made in (
        ("curves", cards.curves_card),
        ("heat", cards.heat_card),
        ("bits", cards.bits_card),
        ("bytes", cards.bytes_card),
        ("points", cards.table_card),
    ):
        parts += [made(page, f"{ident}-{name}{i}", panel, section) for i, panel in enumerate(panels)]
    parts.append(cards.card("Not drawn or not ranked", html.not_drawn(section)))
    return "".join(parts) + "</section>"


def _explored(found: Findings, about: list[str], manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the page's script knows of every point: texts that it shows as they are, by their place in a list of names."""
    rows = rows_of(found.points)
    panels = [(row["run_id"], row["model"], row["task"], mode(row)) for row in rows]
    first = {panel: row for panel, row in reversed(list(zip(panels, rows, strict=True)))}
    sections = list(dict.fromkeys((row["model"], row["task"]) for row in rows))
    parts = [command(row, manifests.get(row["run_id"], {})) for row in rows]
    facets = {
        "model": _indexed(row["model"] for row in rows),
        "task": _indexed(row["task"] for row in rows),
        "family": _indexed(family_of(json.loads(row["stack_config"])) for row in rows),
        "phase": _indexed("–" if row["stack"] == BASE else row["phase"] for row in rows),
        "budget": _indexed(_budget(row) for row in rows),
    }
    points = {
        "label": [one_line(row["label"]) for row in rows],
        "about": about,
        **{name: [row.get(column, math.nan) for row in rows] for name, column in _NUMBERS.items()},
        "panel": _indexed(panels)["of"],
        "unranked": [i for i, row in enumerate(rows) if pd.notna(row["left_out"])],
        **{name: _indexed(part[i] for part in parts) for i, name in enumerate(("run", "stack", "point"))},
    }
    known = [
        {
            "title": " · ".join(map(one_line, (panel[1], panel[2], panel[3], panel[0]))),
            "section": f"s{sections.index((panel[1], panel[2]))}",
            "metric": one_line(first[panel]["metric"]),
            **dict(zip(("model", "task", "mode"), map(one_line, panel[1:]), strict=True)),
            "stream": is_stream(first[panel]),
            "higher": bool(first[panel]["higher_is_better"]),
        }
        for panel in dict.fromkeys(panels)
    ]
    return {"points": points, "facets": facets, "panels": known, "flips": _changed(found.flips), "crowded": CROWDED}


def _indexed(values: Iterable[Any]) -> dict[str, list[Any]]:
    """All values as their names, each once, and the place of each among them."""
    known: dict[Any, int] = {}
    places = [known.setdefault(value, len(known)) for value in values]
    return {"names": [one_line(name) if isinstance(name, str) else name for name in known], "of": places}


def _budget(row: Row) -> str:
    value: str = "" if pd.isna(row["budget_value"]) else f"{row['budget_value']:g}"
    unit: str = "" if pd.isna(row["budget_unit"]) else str(row["budget_unit"])
    return f"{unit} {value}".strip() or "none"


def _changed(flips: Sequence[Flips]) -> dict[str, list[Any]]:
    """Examples once, and for each point how many it lost and won, and of some of these the answer and its score."""
    examples: dict[tuple[Any, ...], int] = {}
    of: list[Any] = []
    for point in flips:
        shown = []
        for one in point.shown:
            example = tuple(map(one_line, (one.example, one.question, one.gold, one.full)))
            place = examples.setdefault((*example, one.full_score), len(examples))
            shown.append([place, one_line(one.answer), one.score])
        of.append([point.lost, point.won, shown] if shown else 0)
    return {"examples": [list(example) for example in examples], "of": of}
