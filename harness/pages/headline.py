"""The sentence a page opens a panel with: what was found there, no more and no less, from a ranked table."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from harness.analysis.intervals import EQUAL, OPEN, TOO_FEW
from harness.analysis.point_row import BASE
from harness.analysis.points import rows_of
from harness.pages.glossary import unheld
from harness.pages.hover import is_stream
from harness.pages.units import difference, share_text
from harness.pages.words.remarks import about_many, peaks_at
from harness.pages.words.verdicts import amount, compared

_EQUAL = (EQUAL, "above")
_WORSE = ("below", "clearly below")
MANY = 20  # compared points, from which a headline says that it picked one of them


class Said(NamedTuple):
    """A sentence, and the label of the point that it is about; None where it is about none."""

    text: str
    label: str | None = None


def headline(panel: pd.DataFrame) -> str:
    """The sentence alone, see `said`."""
    return said(panel).text


def said(panel: pd.DataFrame) -> Said:
    """What the panel shows of caches smaller than the full one; of a panel without scores, that nothing was measured."""
    others = panel[panel["stack"] != BASE]
    if not panel["n"].any():
        return Said(f"Nothing was measured here: {_counts(panel)}")
    if not others["n"].any():
        return Said(
            f"Nothing was measured beside the full cache: {_counts(others)}"
            if len(others)
            else "Only the full cache was measured"
        )
    if panel["discriminative"].eq(False).any():
        return Said("The stacks cannot be told apart here")
    smaller = others[(others["ratio"] < 1) & others["left_out"].isna()]
    if smaller.empty:
        return Said("No cache that could be ranked here is smaller than the full one")
    found = _of_smaller(smaller)
    many = f" (one of {len(smaller):,} compared; no interval is adjusted for that)" if len(smaller) > MANY else ""
    return found._replace(text=found.text + many)


def _of_smaller(smaller: pd.DataFrame) -> Said:
    good = smaller[smaller["vs_full"].isin(_EQUAL)]
    open_ = smaller[smaller["vs_full"] == OPEN]
    worse = smaller[smaller["vs_full"].isin(_WORSE)]
    if len(good):
        return _equal(_smallest(good), len(smaller))
    if len(open_):
        return _unresolved(open_)
    if len(worse) == len(smaller):
        row, open_again = _nearest(worse), sum(map(unheld, rows_of(worse)))
        doubt = f"; among all {len(worse)}, {open_again} of these verdicts do not hold (Holm)" if open_again else ""
        text = f"Every smaller cache does worse than the full one; the nearest is {_with_difference(row)}{doubt}"
        return Said(text, row["label"])
    if (smaller["vs_full"] == TOO_FEW).any():
        return Said("Too few documents for a verdict on any smaller cache")
    return Said("No smaller cache could be compared with the full one")


def _equal(row: pd.Series[Any], among: int) -> Said:
    if row["vs_full"] == "above":
        doubt = f", which does not hold among all {among} compared (Holm)" if unheld(row) else ""
        found = f"{row['label']} does better than the full cache at {share_text(row['ratio'])} of its bytes{doubt}"
    else:
        equal = f"{row['label']} equals the full cache within noise at {share_text(row['ratio'])} of its bytes"
        found = f"{equal}; {_ruled_out(row)}"
    return Said(found + _peak(row), row["label"])


def _unresolved(points: pd.DataFrame) -> Said:
    """The smallest without a loss, else the nearest: what the paired interval leaves open is said, not decided."""
    unharmed = points[_loss(points) <= 0]
    if unharmed.empty:
        row = _nearest(points)
        found = f"Not resolved whether a smaller cache equals the full one; the nearest is {_with_difference(row)}"
    else:
        row = _smallest(unharmed)
        seen = f"{row['label']}, {share_text(row['ratio'])} of the bytes: no loss seen in {_n(row)}"
        found = f"{seen}; {_ruled_out(row)}"
    return Said(found + _settling(row) + _peak(row), row["label"])


def _settling(row: pd.Series[Any]) -> str:
    """How many documents an open verdict takes; empty where that is not known."""
    needed, what = about_many(row), "documents" if is_stream(row) or row["n"] != row["n_documents"] else "prompts"
    return f"; {needed} {what} would settle it" if needed else ""


def _peak(row: pd.Series[Any]) -> str:
    found = peaks_at([row])
    return f"; it {found}" if found else ""


def _ruled_out(row: pd.Series[Any]) -> str:
    """What the paired interval excludes, in the unit that decides the verdict."""
    told = compared(row)
    return f"a loss above {amount(told.most, told.unit)} can be excluded"


def _with_difference(row: pd.Series[Any]) -> str:
    found = difference(row)
    said = found.text + (" nats" if found.in_nats else "")
    return f"{row['label']}, {share_text(row['ratio'])} of the bytes: {said} in {_n(row)}"


def _loss(points: pd.DataFrame) -> pd.Series[float]:
    sign = -1.0 if points["higher_is_better"].iloc[0] else 1.0
    return sign * points["diff_to_full"]


def _smallest(points: pd.DataFrame) -> pd.Series[Any]:
    """The one with the fewest bytes; of equal ones, the one that does best."""
    least = points[points["bytes_context"] == points["bytes_context"].min()]
    return _nearest(least)


def _nearest(points: pd.DataFrame) -> pd.Series[Any]:
    return points.iloc[int(_loss(points).to_numpy().argmin())]


def _n(row: pd.Series[Any]) -> str:
    what = "document" if is_stream(row) else "prompt"
    return f"{row['n']} {what}" if row["n"] == 1 else f"{row['n']} {what}s"


def _counts(points: pd.DataFrame) -> str:
    words = ("failed", "refused", "truncated", "unscored")
    found = [f"{points[f'n_{name}'].sum()} {name}" for name in words if points[f"n_{name}"].any()]
    return ", ".join(found) or "no record"
