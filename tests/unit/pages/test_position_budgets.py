"""Which lines a choice of budget shows by position: a stack's own points at it, or its nearest by tokens kept."""

from __future__ import annotations

import math

import pandas as pd

from harness.pages.place_figures import ALL, budgets, other_shares

NONE = pd.DataFrame()
ROWS = [  # stack, budget, unit, tokens kept of 100
    ("full", math.nan, pd.NA, 100),
    ("h2o", 0.25, "fraction", 13),
    ("h2o", 0.5, "fraction", 25),
    ("snapkv", 0.25, "fraction", 62),
    ("snapkv", 0.5, "fraction", 75),
    ("window", 40.0, "tokens", 40),
    ("window", 50.0, "tokens", 50),
]


def lines() -> list[tuple[pd.Series, pd.DataFrame]]:
    names = ("stack", "budget_value", "budget_unit", "tokens_kept")
    rows = [dict(zip(names, row, strict=True)) | {"tokens_seen": 100, "label": f"{row[0]} {row[1]}"} for row in ROWS]
    return [(pd.Series(row, dtype=object), NONE) for row in rows]


def test_a_stack_shows_its_own_point_at_a_budget_and_else_its_nearest() -> None:
    choices, first = budgets(lines())
    shown = {name: [ROWS[i][:2] for i, on in enumerate(chosen) if on][1:] for name, chosen in choices.items()}
    assert shown["fraction 0.25"] == [("h2o", 0.25), ("snapkv", 0.25), ("window", 40.0)]  # 37.5 % on average
    assert shown["fraction 0.5"] == [("h2o", 0.5), ("snapkv", 0.5), ("window", 50.0)]
    assert shown["tokens 40"] == [("h2o", 0.5), ("snapkv", 0.25), ("window", 40.0)]
    assert all(chosen[0] for chosen in choices.values()) and choices[ALL] == [True] * len(ROWS)
    assert first in choices


def test_names_that_say_another_share_than_was_kept_are_found() -> None:
    assert other_shares(lines()) == ["h2o 0.25 13%", "h2o 0.5 25%", "snapkv 0.25 62%", "snapkv 0.5 75%"]
