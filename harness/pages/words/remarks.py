"""What a name or a ratio does not say of a point: which share of tokens it kept, exact tails, peaks above the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.units import iec, share_text
from harness.pages.words.columns import ABOVE
from harness.types import BYTE_KINDS

_TAIL = 0.25  # of the bytes, from which exact tails are worth a word
_OTHER = 0.1  # by which a kept share may miss the number of a name before that is


def remarks(row: Row) -> list[str]:
    """Of one point of a points table."""
    if row["stack"] == BASE or not row["n"]:
        return []
    return [text for text in (_tail(row), _kept(row)) if text]


def kept_share(row: Row) -> float:
    """Tokens that are stored over tokens read; NaN where that is not known."""
    return float(row["tokens_kept"] / row["tokens_seen"]) if row["tokens_seen"] > 0 else math.nan


def remarks_of(group: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Of a whole table: (what may be remarked of points, these with their own number), what is of none left out."""
    rows = [row for row in rows_of(group) if row["stack"] != BASE and row["n"]]
    tails = [f"{row['label']} {share_text(_tail_share(row))}" for row in rows if _tail_share(row) > _TAIL]
    kept = [f"{row['label']} {share_text(kept_share(row))}" for row in rows if kept_otherwise(row)]
    found = [
        ("Share of the bytes in an exact tail, less on longer prompts", tails),
        ("Share of the tokens kept, where the name says another, which is of the context", kept),
    ]
    return [(text, points) for text, points in found if points]


def kept_otherwise(row: Row) -> bool:
    """Whether the point kept another share of the tokens than the fraction in its name, by a tenth of that."""
    return abs(kept_share(row) / _asked(row) - 1) > _OTHER


def about_many(row: Row) -> str:
    """How many documents would settle an open verdict, "about 22"; empty where that is not known."""
    needed = float(row.get("settled_by", math.nan))
    return f"about {needed:,.0f}" if math.isfinite(needed) else ""


def largest_peak(rows: Iterable[Row]) -> float:
    """The largest of the known shares that points take of their full cache's peak; NaN where none is known."""
    shares = (float(row.get("peak_ratio", math.nan)) for row in rows)
    return max((share for share in shares if math.isfinite(share)), default=math.nan)


def peaks_at(rows: Iterable[Row]) -> str:
    """How far a point, in one or several results, exceeds the peak of the full cache at any time; empty where it does not."""
    most = largest_peak(rows)
    return f"peaks at {share_text(most)} of the full cache's peak" if most > 1 else ""


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
    mark = f" {ABOVE}" if largest_peak([row]) > 1 else ""
    return f"{iec(row.get('bytes_peak_most', math.nan))}{mark}"


def _tail_share(row: Row) -> float:
    kinds = [row[f"allocated_{kind}"] for kind in BYTE_KINDS]
    return float(row["allocated_tail"] / sum(kinds)) if sum(kinds) > 0 else math.nan


def _tail(row: Row) -> str:
    share = _tail_share(row)
    if not share > _TAIL:
        return ""
    return f"exact tail: {share_text(share)} of its bytes ({iec(row['allocated_tail'])}), less on longer prompts"


def _kept(row: Row) -> str:
    if not kept_otherwise(row):
        return ""
    kept, asked = share_text(kept_share(row)), share_text(_asked(row))
    return f"kept {kept} of the tokens, not {asked}, which is of the context (phase {row['phase']})"


def _asked(row: Row) -> float:
    """The share of tokens that a point is named by; NaN where it is named by none."""
    return float(row["budget_value"]) if str(row["budget_unit"]) == "fraction" else math.nan
