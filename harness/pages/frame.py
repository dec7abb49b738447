"""The frame of a page: its style, its script and Plotly itself, once.

Nothing is fetched: the content security policy of the page forbids the browser any address outside the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from harness.pages.looks import FONT

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:"


def render(title: str, body: str, content: dict[str, Any]) -> str:
    """The whole page: `title` is markup, `body` HTML.

    `content` holds by element id figures, maps, axis titles, views, visible lines and windows of bars.
    """
    content = content | {"lines": _share_lines(content["figures"], content["heat"])}
    data = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>:root{{--font:{FONT}}}{_own('page.css')}</style></head><body><main>{body}</main>",
            f'<script id="content" type="application/json">{data}</script>',
            f"<script>{get_plotlyjs()}</script><script>{_own('page.js')}</script></body></html>",
        ]
    )


@cache
def _own(name: str) -> str:
    """A file that lies beside this module, installed or not."""
    return files("harness.pages").joinpath(name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Numbers that strict JSON cannot hold become null: nothing is drawn there, and the page lists them elsewhere."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _share_lines(figures: dict[str, Any], heat: dict[str, Any]) -> list[str]:
    """Replace hover texts by numbers of their lines, which many points have in common; returns the lines."""
    lines: dict[str, int] = {}

    def numbers(text: str) -> list[int]:
        return [lines.setdefault(line, len(lines)) for line in text.split("<br>")]

    for trace in (trace for figure in figures.values() for trace in figure["data"]):
        texts = trace.get("customdata", [])
        if len(texts) and isinstance(texts[0], str):
            trace["customdata"] = [numbers(text) for text in texts]
    for one in (one for maps in heat.values() for one in maps):
        one["customdata"] = [[numbers(text) for text in row] for row in one["customdata"]]
    return list(lines)


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
