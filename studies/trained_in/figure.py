"""Recall against KV bytes a token as an SVG, drawn by hand: a dot a model, a bar its interval, a line a design's mean."""

from __future__ import annotations

import math
from html import escape

import pandas as pd

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 48, 56
COLOURS = ("#1b1f24", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#E69F00")
INK, MUTED, GRID = "#1b1f24", "#6b7280", "#e8ebef"
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
NEAR = 15  # pixels between two names


def svg(points: pd.DataFrame, chance: float) -> str:
    """The figure of a table with design, seed, recall and its bounds, bytes_per_token. `chance` is drawn as a line."""
    least, most = points["bytes_per_token"].min() / 1.25, points["bytes_per_token"].max() * 1.25
    seeds = points["seed"].nunique()

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / least) / math.log(most / least)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

    title = (
        f"Recall of one of 16 keys; {'one model' if seeds == 1 else f'{seeds} models'} a design, bars 95 % over the questions"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 26, title, INK, size=14),
        *(_level(y(share), f"{share:g}") for share in (0, 0.25, 0.5, 0.75, 1)),
        *(_mark(x(value), f"{value:g}") for value in _powers(least, most)),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "KV bytes a token of the context (log)", INK, anchor="middle"),
        _across(LEFT, WIDTH - RIGHT, y(chance), f'stroke="{MUTED}" stroke-dasharray="4 4"'),
        _text(WIDTH - RIGHT + 6, y(chance) + 4, "a guess", MUTED),
    ]
    names: list[tuple[float, float, str, str]] = []
    for colour, (design, group) in zip(COLOURS, points.groupby("design", sort=False), strict=False):
        middle = x(group["bytes_per_token"].mean())
        for number, row in enumerate(group.itertuples()):
            at = middle + 7 * (number - (len(group) - 1) / 2)
            low, high, dot = (f"{y(value):.1f}" for value in (row.recall_lo, row.recall_hi, row.recall))
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low}" y2="{high}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{at:.1f}" cy="{dot}" r="4" fill="{colour}"/>')
        mean = y(group["recall"].mean())
        if len(group) > 1:
            parts.append(_across(middle - 13, middle + 13, mean, f'stroke="{colour}" stroke-width="2"'))
        names.append((middle + 16, mean + 4, str(design), colour))
    parts += [_text(at, height, name, colour) for at, height, name, colour in _apart(names)]
    return "\n".join([*parts, "</svg>", ""])


def _apart(names: list[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """The names from the highest down, each moved below those that it would be written over."""
    placed: list[tuple[float, float, str, str]] = []
    for at, height, name, colour in sorted(names, key=lambda one: one[1]):
        for left, above, other, _ in placed:
            if at < left + 7.5 * len(other) and left < at + 7.5 * len(name) and abs(height - above) < NEAR:
                height = above + NEAR
        placed.append((at, height, name, colour))
    return placed


def _powers(least: float, most: float) -> list[int]:
    return [2**power for power in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1)]


def _across(left: float, right: float, height: float, style: str) -> str:
    return f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{height:.1f}" y2="{height:.1f}" {style}/>'


def _level(height: float, name: str) -> str:
    line = _across(LEFT, WIDTH - RIGHT, height, f'stroke="{GRID}"')
    return line + _text(LEFT - 8, height + 4, name, MUTED, anchor="end")


def _mark(at: float, name: str) -> str:
    line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>'
    return line + _text(at, HEIGHT - BOTTOM + 18, name, MUTED, anchor="middle")


def _text(x: float, y: float, words: str, colour: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
