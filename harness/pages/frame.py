"""The frame of a page: its style, its scripts and Plotly itself, once.

Nothing is fetched: the content security policy of the page forbids the browser any address outside the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from harness.pages.looks import FONT

_SCRIPTS = (  # the last one draws
    *("store.js", "theme.js", "tables.js", "detail.js", "filters.js", "labels.js", "fold.js", "image.js", "sides.js"),
    "page.js",
)
_PARTS = re.compile(r"(?<=  )(?!·)")  # a line of a hover text, cut after every two spaces
_LONG = 8  # values of a list that is worth a place of its own
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:"


def render(title: str, body: str, content: dict[str, Any]) -> str:
    """The whole page: `title` is markup, `body` HTML.

    `content` holds by element id figures, maps, axis titles, views, visible lines, windows of bars and rows of tables, and
    what is known of each point, where a page has points.
    """
    data = json.dumps(_plain(_Packed().pack(content)), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>:root{{--font:{FONT}}}{_own('page.css')}</style></head><body><main>{body}</main>",
            f'<script id="content" type="application/json">{data}</script>',
            f"<script>{get_plotlyjs()}</script><script>{''.join(map(_own, _SCRIPTS))}</script></body></html>",
        ]
    )


@cache
def _own(name: str) -> str:
    """A file that lies beside this module, installed or not."""
    return files("harness.pages").joinpath(name).read_text(encoding="utf-8")


def _number(value: Any) -> Any:
    """A whole number without a point; what strict JSON cannot hold is null: it is not drawn, and listed elsewhere."""
    if not isinstance(value, float):
        return value
    return None if not math.isfinite(value) else int(value) if value.is_integer() else value


def _plain(value: Any) -> Any:
    """The value as strict JSON holds it."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


class _Once:
    """Values by their number, each held once."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.known.setdefault(value, len(self.known))

    def values(self) -> list[Any]:
        return list(self.known)


class _Packed:
    """A page's content with every text of a hover, every cell of a table and every long list in it once.

    The script of the page puts them back (`unpack`). A hover text is lines, a line is parts, and a point's budget or bytes are
    in one part of it only.
    """

    def __init__(self) -> None:
        self.parts, self.lines, self.texts, self.cells, self.lists = _Once(), _Once(), _Once(), _Once(), _Once()

    def pack(self, content: dict[str, Any]) -> dict[str, Any]:
        """The content, and what it refers to."""
        for figure in content["figures"].values():
            for trace in figure["data"]:
                if trace["type"] != "heatmap" and trace.get("customdata"):
                    trace["customdata"] = [self._text(text) for text in trace["customdata"]]
                elif trace.get("customdata"):
                    trace["customdata"] = self._grid(trace["customdata"])
        for one in (one for maps in content["heat"].values() for one in maps):
            one["customdata"] = self._grid(one["customdata"])
        found = dict(content)
        if "points" in content:
            points = content["points"]
            found["points"] = self._listed(points | {"about": [self._text(text) for text in points["about"]]})
            found["facets"], found["rows"] = self._listed(content["facets"]), self._listed(content["rows"])
        tables = {
            name: [[self.cells.number(cell) for cell in row] for row in rows]
            for name, rows in content.get("tables", {}).items()
        }
        found |= {"figures": self._listed(content["figures"]), "tables": tables}
        own = ("parts", "lines", "texts", "cells", "lists")
        return found | {name: getattr(self, name).values() for name in own}

    def _text(self, text: str) -> int:
        lines = (tuple(map(self.parts.number, _PARTS.split(line))) for line in text.split("<br>"))
        return self.texts.number(tuple(self.lines.number(line) for line in lines))

    def _grid(self, rows: Sequence[Sequence[str]]) -> list[list[int]]:
        return [[self._text(text) for text in row] for row in rows]

    def _listed(self, value: Any) -> Any:
        """The value with every long list of numbers or words as its place among all, or as what all of it is."""
        if isinstance(value, dict):
            return {key: self._listed(one) for key, one in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if len(value) < _LONG or any(isinstance(one, dict | list | tuple) for one in value):
            return [self._listed(one) for one in value]
        whole = tuple(map(_number, value))
        return {"@": whole[0], "n": len(whole)} if len(set(whole)) == 1 else {"@": self.lists.number(whole)}


def switch(plot: str, action: str, options: dict[str, str], pressed: str | None = None) -> str:
    """A row of buttons of which one is pressed, the first to begin with if not said; `options` maps values to names."""
    first = pressed or next(iter(options))
    buttons = "".join(
        f'<button type="button" value="{value}" aria-pressed="{str(value == first).lower()}">{name}</button>'
        for value, name in options.items()
    )
    return f'<span class="switch" role="group" data-plot="{plot}" data-action="{action}">{buttons}</span>'


def select_options(names: Sequence[str], chosen: str | None = None) -> str:
    """Options of a selector; the script goes by an option's place among all of its selector, never by its name."""
    return "".join(f'<option value="{name}"{" selected" * (name == chosen)}>{name}</option>' for name in names)


def only_in(plot: str, view: str, shown: str, inner: str) -> str:
    """HTML that shows on the page only while the plot is in a view; `shown` is the view to begin with."""
    return f'<span data-of="{plot}" data-in="{view}"{" hidden" * (view != shown)}>{inner}</span>'
