"""What a name or a ratio does not say of a point: which share of tokens it kept, exact tails, peaks above the full cache."""

from __future__ import annotations

import math

import pandas as pd

from harness.analysis.point_row import BASE
from harness.analysis.points import Row
from harness.pages.units import iec, share_text
from harness.pages.words.columns import ABOVE
from harness.types import BYTE_KINDS

TAIL = 0.25  # of the bytes, from which exact tails are worth a word
_OTHER = 0.1  # by which a kept share may miss the number of a name before that is


def remarks(row: Row) -> list[str]:
    """Of one point of a points table."""
    if row["stack"] == BASE or not row["n"]:
        return []
    return [text for text in (_tail(row), _kept(row)) if text]


def kept_share(row: Row) -> float:
    """Tokens that are stored over tokens read; NaN where that is not known."""
    return float(row["tokens_kept"] / row["tokens_seen"]) if row["tokens_seen"] > 0 else math.nan


def above_full(group: pd.DataFrame) -> list[str]:
    """Of a whole table: that points take more than the full cache while the context is compressed; nothing where none does."""
    if "peak_ratio" not in group:
        return []
    over = group[group["peak_ratio"] > 1]
    if over.empty:
        return []
    others = int((group["stack"] != BASE).sum())
    most = over.iloc[int(over["peak_ratio"].to_numpy().argmax())]
    return [
        f"Peak: {len(over)} of {others} points hold more than the full cache ever does while the context is compressed, "
        f"{most['label']} {share_text(most['peak_ratio'])}: the exact context and its compressed copy are there together."
    ]


def peak_text(row: Row) -> str:
    """The most bytes at any time, marked where that is more than the full cache ever holds."""
    mark = f" {ABOVE}" if over_full(row) else ""
    return f"{iec(row.get('bytes_peak_most', math.nan))}{mark}"


def over_full(row: Row) -> bool:
    """Whether the point ever holds more than the full cache does."""
    return bool(row.get("peak_ratio", math.nan) > 1)


def _tail(row: Row) -> str:
    kinds = [row[f"allocated_{kind}"] for kind in BYTE_KINDS]
    share = row["allocated_tail"] / sum(kinds) if sum(kinds) > 0 else math.nan
    if not share > TAIL:
        return ""
    return f"exact tail: {share_text(share)} of its bytes ({iec(row['allocated_tail'])}), less on longer prompts"


def _kept(row: Row) -> str:
    share, asked = kept_share(row), row["budget_value"] if str(row["budget_unit"]) == "fraction" else math.nan
    if not abs(share / asked - 1) > _OTHER:
        return ""
    return f"kept {share_text(share)} of the tokens, not {share_text(asked)}, which is of the context (phase {row['phase']})"
