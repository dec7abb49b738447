"""All that a report shows of its records, computed once: terminal, files and page are handed the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.certainty import detectable, frontier_chance, holm, settling
from harness.analysis.contrast import Flips, flips
from harness.analysis.curves import Curves, curves
from harness.analysis.frontier import frontier, rank
from harness.analysis.joint import joint
from harness.analysis.peaks import peaks
from harness.analysis.points import cells, points

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What some records amount to.

    Attributes:
        points: the points table with `on_frontier` and `left_out`.
        cells: scores at each length and depth, for maps; empty where examples have neither.
        curves: perplexity by position; empty where no record names a series.
        frontier: the content of frontier.json.
        flips: for each row of `points`, the answers that changed against the full cache.
    """

    points: pd.DataFrame
    cells: pd.DataFrame
    curves: Curves
    frontier: dict[str, Any]
    flips: list[Flips]


def findings(records: Sequence[Record], folder: Path = Path()) -> Findings:
    """What these records of one or several runs amount to; `folder` is what their series files are named from."""
    ranked = judged(rank(points(records)), records)
    return Findings(
        points=ranked,
        cells=cells(records),
        curves=curves(folder, records, ranked),
        frontier=frontier(ranked) | {"joint": joint(ranked)},
        flips=flips(records),
    )


def judged(ranked: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """The ranked table with what many comparisons and few documents leave, and with the most bytes at any time.

    Added are `holm_p`, `detectable`, `settled_by`, `p_frontier`, and the columns of `peaks`.
    """
    sure = {"holm_p": holm(ranked), "detectable": detectable(ranked), "settled_by": settling(ranked, records)}
    most = {str(name): column for name, column in peaks(ranked).items()}
    return ranked.assign(**sure, p_frontier=frontier_chance(ranked, records), **most)
