"""Points of one run against one of them, paired: records to one typed table.

A row is one point beside the point that was named, on the same examples. The pairing rule, the statistics and the labels
are those of the points table (`point_row`); only the base is another point than the full cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.analysis.labels import mode
from harness.analysis.point_measures import mean, number, ratio
from harness.analysis.point_row import RUN_GROUP, Point, Record, compare, configurations, spread
from harness.errors import require

COLUMNS: dict[str, str] = {
    **dict.fromkeys(("run_id", "model", "task"), "string"),
    "query_aware": "bool",
    **dict.fromkeys(("attn", "metric", "aggregate"), "string"),
    "higher_is_better": "bool",
    **dict.fromkeys(("label", "against"), "string"),
    **dict.fromkeys(("n", "against_n", "n_shared"), "int64"),
    **dict.fromkeys(("score", "score_lo", "score_hi", "against_score", "against_lo", "against_hi"), "float64"),
    **dict.fromkeys(("diff_to_against", "diff_lo", "diff_hi", "mcnemar_p"), "float64"),
    **dict.fromkeys(("nll_diff", "nll_diff_lo", "nll_diff_hi"), "float64"),
    **dict.fromkeys(("verdict", "reason"), "string"),
    **dict.fromkeys(("bytes_context", "bytes_against", "bytes_ratio"), "float64"),
    **dict.fromkeys(("storage", "against_storage"), "string"),
}
_RUN = ("metric", "aggregate", "higher_is_better")


@dataclass(frozen=True, kw_only=True)
class Contrasts:
    """The table (see COLUMNS) and a line for every run without a point of a wanted name."""

    frame: pd.DataFrame
    problems: list[str]


def contrasts(records: Iterable[Record], against: Sequence[str]) -> Contrasts:
    """Every point of each run and mode beside the points named in `against`, in the order of the points table.

    Differences are the row's point minus the named one; `verdict` is the points table's `vs_full` with the named point in
    the place of the full cache. `n` and `against_n` count the scored examples of each, `n_shared` those of both. The
    columns about the named point are over the row's examples only, or empty with the reason in `reason`. Bytes are means
    over those examples, `bytes_ratio` is their sum over the named point's.

    Raises:
        UserError: no run has a point of that label.
    """
    runs: dict[tuple[Any, ...], dict[str, Point]] = {}
    for point in configurations(records):
        runs.setdefault(point.run, {})[point.label] = point
    known = list(dict.fromkeys(label for points in runs.values() for label in points))
    for wanted in against:
        require(wanted in known, "--against", wanted, f"the labels here are {', '.join(known)}")
    rows, problems = [], []
    for run, points in runs.items():
        named = dict(zip(RUN_GROUP, run, strict=True))
        for wanted in dict.fromkeys(against):
            if wanted not in points:
                problems.append(
                    f"run {named['run_id']}, {mode(named)}, attn={named['attn']}: no point {wanted} to compare with"
                )
                continue
            rows += [named | _row(point, points[wanted]) for label, point in points.items() if label != wanted]
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype="object" if not rows else None).astype(COLUMNS)
    return Contrasts(frame=frame, problems=problems)


def _row(point: Point, against: Point) -> dict[str, Any]:
    first = point.first
    found = compare(point, against.latest, against.label)
    return {
        **{name: first[name] for name in _RUN},
        "label": point.label,
        "against": against.label,
        "n": len(point.scored),
        "against_n": len(against.scored),
        "n_shared": len(found.shared),
        **spread("score", found.score),
        **spread("against", found.other, value="against_score"),
        **spread("diff", found.paired, value="diff_to_against"),
        **spread("nll_diff", found.nats),
        "mcnemar_p": found.paired.p_value if found.paired.exact else math.nan,
        "verdict": found.verdict(higher_is_better=bool(first["higher_is_better"])),
        "reason": found.reason,
        **_bytes(point, against, found.shared),
        "storage": first["storage"],
        "against_storage": against.first["storage"],
    }


def _bytes(point: Point, against: Point, shared: Sequence[Any]) -> dict[str, float]:
    """Mean context bytes of the point; those of the other only where it was scored on all of the point's examples."""
    mine = _context(list(point.scored.values()))
    if len(shared) < len(point.scored):
        return {"bytes_context": mean(mine)}
    theirs = _context([against.scored[example] for example in shared])
    return {"bytes_context": mean(mine), "bytes_against": mean(theirs), "bytes_ratio": ratio(mine, theirs)}


def _context(records: Sequence[Record]) -> NDArray[np.float64]:
    return np.array([number(record["kv_bytes_context"]) for record in records], dtype=np.float64)
