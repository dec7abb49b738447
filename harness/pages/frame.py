"""The frame of a page: styles, the script and Plotly itself, once; it knows no points.

Nothing is fetched: the content security policy of the page forbids the browser any address outside the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from plotly.offline import get_plotlyjs

from harness.pages.looks import FONT
from harness.pages.script import SCRIPT

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:"

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:#f4f6f8;color:#1b1f24;font:15px/1.5 FONT;-webkit-font-smoothing:antialiased}
main{max-width:1360px;margin:0 auto;padding:36px 28px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.015em}
h2{font-size:22px;margin:44px 0 2px;letter-spacing:-.01em} h3{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px} .quiet{color:#5b6470;font-size:14px} .small{font-size:13px}
.card{background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:18px 20px;margin:14px 0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:14px;margin:14px 0}
.facts .card{margin:0} .facts b.big{display:block;font-size:19px;line-height:1.3;overflow-wrap:anywhere}
.head{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;justify-content:space-between;margin-bottom:6px}
.switches{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center;font-size:13px;color:#5b6470}
.switch{display:inline-flex;border:1px solid #c9d0d8;border-radius:7px;overflow:hidden}
.switch button{font:inherit;color:#1b1f24;background:#fff;border:0;padding:4px 12px;cursor:pointer}
.switch button+button{border-left:1px solid #c9d0d8} .switch button[aria-pressed=true]{background:#1b1f24;color:#fff}
.switch button:focus-visible,select:focus-visible,th button:focus-visible{outline:2px solid #0072B2;outline-offset:-2px}
select{font:inherit;font-size:14px;padding:4px 8px;border:1px solid #c9d0d8;border-radius:7px;background:#fff}
.scroll{max-height:600px;overflow:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid #edf0f3}
.l{text-align:left} td:last-child{white-space:normal;min-width:360px}
th{position:sticky;top:0;background:#fff;z-index:1;padding:0;border-bottom:1px solid #c9d0d8}
th button{font:inherit;font-weight:600;border:0;background:none;padding:7px 10px;cursor:pointer;width:100%}
th button{text-align:inherit} tr.front td{font-weight:600} tr.base td{background:#f6f7f9}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px}
dt{color:#5b6470} dd{margin:0;overflow-wrap:anywhere} ul{margin:6px 0 0;padding-left:20px} summary{cursor:pointer}
.warn{border-left:4px solid #D55E00} .js-plotly-plot{width:100%} .js-plotly-plot .main-svg{overflow:visible!important}
@media print{body{background:#fff}.card{break-inside:avoid}.switches{display:none}.scroll{max-height:none}}
"""


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
            f"<style>{_CSS.replace('FONT', FONT)}</style></head><body><main>{body}</main>",
            f'<script id="content" type="application/json">{data}</script>',
            f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script></body></html>",
        ]
    )


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
    """HTML that stands on the page only while the plot is in a view; `shown` is the view to begin with."""
    return f'<span data-of="{plot}" data-in="{view}"{" hidden" * (view != shown)}>{inner}</span>'
