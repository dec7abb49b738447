"""How a stack looks in every figure of a page, and the plain layout they share.

Colour, marker shape and dash together: no two stacks share both colour and shape, so a page also reads in greyscale and
for colour-blind readers (the first five hues are of the palette of Okabe and Ito).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

INK = "#1b1f24"
MUTED = "#6b7280"
GRID = "#e8ebef"
FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"

_COLOURS = (  # one hue each; the dark theme has its own shade of those that are dark
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7A3E9D", "#8C5A3C", "#5D5D5D"),
    *("#8FA31E", "#C2193B", "#17A2B8"),
)
_SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon", "hexagram"),
    *("triangle-left", "triangle-right", "hourglass", "bowtie", "star-diamond", "hexagon2"),
)  # 15 shapes and 11 colours have no common factor: 165 different pairs
FRONTIER_RANK = 2  # in a legend: the full cache, the frontier, then the stacks by name
_LEGEND_ROW = 22  # pixels
_TALLEST = 900  # pixels of a figure; longer legends scroll
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")

KIND_LOOKS: dict[str, tuple[str, str]] = {
    "payload": ("#0072B2", ""),
    "metadata": ("#E69F00", "/"),
    "tail": ("#56B4E9", "\\"),
    "positions": ("#009E73", "x"),
    "state": ("#D55E00", "."),
    "recurrent": ("#F0E442", "|"),
    "padding": ("#9AA0A6", "-"),
    "scratch": ("#CC79A7", "+"),
}


@dataclass(frozen=True)
class Look:
    """Colour, marker symbol and dash of one stack, and its place in legends."""

    colour: str
    symbol: str
    dash: str
    rank: int

    def marker(self, storage: str) -> str:
        """The symbol, hollow where the storage is only simulated."""
        return f"{self.symbol}-open" if storage == "simulated" else self.symbol

    def faded(self, alpha: float) -> str:
        """The colour with an opacity, as CSS."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


def looks(stacks: Iterable[str], base: str) -> dict[str, Look]:
    """One look a stack, the same for the same set of stacks in any order; `base` is always a black star."""
    table = {base: Look(INK, "star", "solid", FRONTIER_RANK - 1)}
    names = sorted(set(stacks) - {base})
    ranks = {stack: FRONTIER_RANK + 1 + i for i, stack in enumerate(sorted(names, key=_as_read))}
    for i, stack in enumerate(names):
        dash = _DASHES[(i // (len(_COLOURS) * len(_SYMBOLS)) + i) % len(_DASHES)]
        table[stack] = Look(_COLOURS[i % len(_COLOURS)], _SYMBOLS[i % len(_SYMBOLS)], dash, ranks[stack])
    return table


def _as_read(name: str) -> list[str | int]:
    """The order people expect: int2 before int16, no matter the case."""
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"(\d+)", name)]


def legend(click: str) -> dict[str, Any]:
    """A legend at the right; `click` is what a click on an entry does to the others of its group."""
    return {"groupclick": click, "itemsizing": "constant", "font": {"size": 12}, "tracegroupgap": 2}


def legend_height(entries: int, least: int, margin: dict[str, int]) -> int:
    """Height of a figure in pixels, so that a legend of so many entries fits without scrolling where that is sensible."""
    return max(least, min(entries * _LEGEND_ROW + margin["t"] + margin["b"], _TALLEST))


def colorbar(title: str) -> dict[str, Any]:
    """The scale of a map; its title beside it, where it meets no number."""
    return {"title": {"text": title, "font": {"size": 13}, "side": "right"}, "thickness": 12, "outlinewidth": 0}


def layout(**changes: Any) -> dict[str, Any]:
    """Layout shared by all figures: white, quiet grid, hover names never cut."""
    return {
        "template": "none",
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 64, "r": 16, "t": 44, "b": 56},
        "hovermode": "closest",
        "hoverlabel": {
            "namelength": -1,
            "align": "left",
            "bgcolor": "white",
            "bordercolor": "#c3c9d1",
            "font": {"family": FONT, "size": 12, "color": INK},
        },
        **changes,
    }


AXIS = {
    "gridcolor": GRID,
    "linecolor": "#b6bdc6",
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
}
