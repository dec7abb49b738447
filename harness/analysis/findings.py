"""All that a report shows of its records, computed once: terminal, files and page are handed the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.certainty import detectable, frontier_chance, holm
from harness.analysis.curves import Curves, curves
from harness.analysis.frontier import frontier, rank
from harness.analysis.joint import joint
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
    """

    points: pd.DataFrame
    cells: pd.DataFrame
    curves: Curves
    frontier: dict[str, Any]


def findings(records: Sequence[Record], folder: Path = Path()) -> Findings:
    """What these records of one or several runs amount to; `folder` is what their series files are named from."""
    ranked = judged(rank(points(records)), records)
    return Findings(
        points=ranked,
        cells=cells(records),
        curves=curves(folder, records, ranked),
        frontier=frontier(ranked) | {"joint": joint(ranked)},
    )


def judged(ranked: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """The ranked table with `holm_p`, `detectable` and `p_frontier`: what many comparisons and few documents leave."""
    return ranked.assign(holm_p=holm(ranked), detectable=detectable(ranked), p_frontier=frontier_chance(ranked, records))
