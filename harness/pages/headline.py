"""The sentence a page opens a panel with: what was found there, no more and no less, from a ranked table.

And the same for several tasks or models together, with the words of their table, which terminal and page share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.intervals import EQUAL, TOO_FEW
from harness.analysis.joint import NATS
from harness.analysis.point_row import BASE
from harness.analysis.points import rows_of
from harness.pages.glossary import unheld, verdict_text
from harness.pages.hover import is_stream
from harness.pages.units import Difference, difference, score_text, share_text, small

_EQUAL = (EQUAL, "above")
_WORSE = ("below", "clearly below")
KEPT = 0.95  # of the full cache's score above chance, which a headline over several tasks looks for
MANY = 20  # compared points, from which a headline says that it picked one of them


def headline(panel: pd.DataFrame) -> str:
    """What the panel shows of caches smaller than the full one; of a panel without scores, that nothing was measured."""
    others = panel[panel["stack"] != BASE]
    if not panel["n"].any():
        return f"Nothing was measured here: {_counts(panel)}"
    if not others["n"].any():
        return (
            f"Nothing was measured beside the full cache: {_counts(others)}"
            if len(others)
            else "Only the full cache was measured"
        )
    if panel["discriminative"].eq(False).any():
        return "The stacks cannot be told apart here"
    smaller = others[(others["ratio"] < 1) & others["left_out"].isna()]
    if smaller.empty:
        return "No cache that could be ranked here is smaller than the full one"
    many = f" (one of {len(smaller):,} compared; no interval is adjusted for that)" if len(smaller) > MANY else ""
    return _of_smaller(smaller) + many


def _of_smaller(smaller: pd.DataFrame) -> str:
    good = smaller[smaller["vs_full"].isin(_EQUAL)]
    open_ = smaller[smaller["vs_full"] == "not resolved"]
    worse = smaller[smaller["vs_full"].isin(_WORSE)]
    if len(good):
        return _equal(_smallest(good), len(smaller))
    if len(open_):
        return _unresolved(open_)
    if len(worse) == len(smaller):
        said = f"Every smaller cache does worse than the full one; the nearest is {_with_difference(_nearest(worse))}"
        open_again = sum(map(unheld, rows_of(worse)))
        return said + (f"; among all {len(worse)}, {open_again} of these verdicts do not hold (Holm)" if open_again else "")
    if (smaller["vs_full"] == TOO_FEW).any():
        return "Too few documents for a verdict on any smaller cache"
    return "No smaller cache could be compared with the full one"


def joint_headline(entry: Mapping[str, Any]) -> str:
    """What a joint frontier shows of caches smaller than the full one; a mean over tasks or models has no interval."""
    smaller = [point for point in entry["points"] if point["ratio"] < 1]
    if not smaller:
        return "No smaller cache has a score on all of them"
    if smaller[0]["score"] is None:
        return _without_loss(entry, smaller)
    near = [point for point in smaller if point["score"] >= KEPT]
    best = min(near, key=lambda point: point["ratio"]) if near else max(smaller, key=lambda point: point["score"])
    kept = f"{share_text(KEPT)} of the full cache's score above chance over {len(entry['members'])} {entry['over']}"
    named = f"{best['label']}, {share_text(best['ratio'])} of the bytes"
    said = f"{score_text(best['score'])} on average, {score_text(best['worst'])} at the worst"
    return (
        f"{named}, is the smallest that keeps {kept}: {said}"
        if near
        else f"No smaller cache keeps {kept}; the nearest is {named}: {said}"
    )


def _without_loss(entry: Mapping[str, Any], smaller: Sequence[Mapping[str, Any]]) -> str:
    """The smallest that lost on no member, with what each leaves open; units differ, so no mean is taken."""
    unharmed = [
        point
        for point in smaller
        if all(_no_loss(part, entry["better"][name] == "higher") for name, part in point["against_full"].items())
    ]
    if not unharmed:
        return f"Every smaller cache loses on {' or '.join(entry['members'])}, or it is not resolved"
    best = min(unharmed, key=lambda point: point["ratio"])
    parts = ((name, best["against_full"][name]) for name in entry["members"])
    said = "; ".join(f"{name} {_beside_full(part, entry['units'][name])} (n {part['n']})" for name, part in parts)
    return f"{best['label']}, {share_text(best['ratio'])} of the bytes, is the smallest without a loss on any of them: {said}"


def _no_loss(part: Mapping[str, Any], higher_is_better: bool) -> bool:
    """Equal within noise or better, its interval reaching 0 in the member's own unit; or not resolved, and no loss seen."""
    told = part["high"] < 0 if higher_is_better else part["low"] > 0
    unseen = part["verdict"] == "not resolved" and (part["difference"] >= 0) == higher_is_better
    return not told and (part["verdict"] in _EQUAL or unseen)


def joint_title(entry: Mapping[str, Any]) -> str:
    """What a joint frontier is of: how many tasks or models, which, of what, and whether questions were seen."""
    asked = "query-aware" if entry["query_aware"] else "query-agnostic"
    common = entry["model" if entry["over"] == "tasks" else "task"]
    return f"{common} · {asked} · {len(entry['members'])} {entry['over']} together: {', '.join(entry['members'])}"


def joint_cells(entry: Mapping[str, Any]) -> list[dict[str, tuple[float | None, str]]]:
    """For each point of a joint frontier, by column: what it sorts by (None: the text), and its text."""
    return [_joint_cells(point, entry["units"]) for point in entry["points"]]


def _joint_cells(point: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, tuple[float | None, str]]:
    means = {"mean of normalised scores": point["score"], "worst": point["worst"]}
    compared = point["against_full"].items()
    return {
        "stack and point": (None, point["label"]),
        "of full": (point["ratio"], share_text(point["ratio"])),
        **{
            f"{name}: {units[name]} vs full": (
                part["difference"],
                "base" if point["stack"] == BASE else _compared(part, units[name]),
            )
            for name, part in compared
        },
        **{name: (value, score_text(value)) for name, value in means.items() if value is not None},
        "frontier": (None, "●" if point["on_frontier"] else ""),
    }


def _compared(part: Mapping[str, Any], unit: str) -> str:
    return f"{_beside_full(part, unit)} {verdict_text(part['verdict'])}"


def _beside_full(part: Mapping[str, Any], unit: str) -> str:
    """A difference to the full cache and its interval, in the member's unit."""
    value, low, high = (math.nan if part[name] is None else float(part[name]) for name in ("difference", "low", "high"))
    return Difference(value, low, high, unit == NATS).text + (" nats" if unit == NATS else "")


def _equal(row: pd.Series[Any], compared: int) -> str:
    if row["vs_full"] == "above":
        doubt = f", which does not hold among all {compared} compared (Holm)" if unheld(row) else ""
        return f"{row['label']} does better than the full cache at {share_text(row['ratio'])} of its bytes{doubt}"
    found = f"{row['label']} equals the full cache within noise at {share_text(row['ratio'])} of its bytes"
    return f"{found}; {_excluded(row)}"


def _unresolved(points: pd.DataFrame) -> str:
    """The smallest without a loss, else the nearest: what the paired interval leaves open is said, not decided."""
    unharmed = points[_loss(points) <= 0]
    if unharmed.empty:
        nearest = _with_difference(_nearest(points))
        return f"Not resolved whether a smaller cache equals the full one; the nearest is {nearest}"
    row = _smallest(unharmed)
    return f"{row['label']}, {share_text(row['ratio'])} of the bytes: no loss seen in {_n(row)}; {_excluded(row)}"


def _excluded(row: pd.Series[Any]) -> str:
    found = difference(row)
    most = -found.low if row["higher_is_better"] else found.high
    unit = " nats" if found.in_nats else "" if row["higher_is_better"] else f" of {row['metric']}"
    return f"a loss above {score_text(most) if most >= 0.095 else small(most)}{unit} can be excluded"


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
