"""Records to points: one typed row per configuration.

A row is what one stack at one point did on all its examples of one run: score with interval, paired difference to the
full cache of the same run on the same prompts, and the bytes it held. Every column has one type, so a table can
always be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import pandas as pd

from harness.analysis import point_row
from harness.analysis.point_cells import cell_rows
from harness.analysis.point_measures import FIDELITY
from harness.types import BYTE_KINDS

Json = dict[str, Any]
Row: TypeAlias = "Mapping[str, Any] | pd.Series[Any]"

_STRING, _INT, _FLOAT, _BOOL = "string", "int64", "float64", "bool"
COLUMNS: dict[str, str] = {
    **dict.fromkeys(("run_id", "model", "task", "metric", "stack", "point", "label"), _STRING),
    "query_aware": _BOOL,
    **dict.fromkeys(("positions", "phase", "attn", "seeds", "storage", "budget_unit"), _STRING),
    "budget_value": _FLOAT,
    **dict.fromkeys(("n", "n_documents"), _INT),
    **dict.fromkeys(("n_prompts", "n_failed", "n_refused", "n_not_exercised", "n_truncated", "n_unscored"), _INT),
    **dict.fromkeys(("n_empty", "n_superseded", "n_without_bytes"), _INT),
    "adaptive": _BOOL,
    **dict.fromkeys(("score", "score_lo", "score_hi", "full_score", "full_lo", "full_hi"), _FLOAT),
    **dict.fromkeys(("diff_to_full", "diff_lo", "diff_hi", "mcnemar_p", "paired_p"), _FLOAT),
    **dict.fromkeys(("nll_diff", "nll_diff_lo", "nll_diff_hi"), _FLOAT),
    **dict.fromkeys(("diff_reason", "vs_full", "aggregate"), _STRING),
    "higher_is_better": _BOOL,
    "chance": _FLOAT,
    "discriminative": "boolean",
    **dict.fromkeys(("bytes_context", "bytes_full", "ratio", "bytes_final", "bytes_full_final", "ratio_final"), _FLOAT),
    **dict.fromkeys(("bytes_peak", "bytes_peak_prefill", "bytes_logical"), _FLOAT),
    "peak_exceeds_full": _BOOL,
    **{f"{sort}_{kind}": _FLOAT for sort in ("allocated", "logical") for kind in BYTE_KINDS},
    **dict.fromkeys(("reach", "tokens_seen", "tokens_kept", "effective_bits", "chunk"), _FLOAT),
    **dict.fromkeys((*FIDELITY, "answer_flips", "score_first", "score_later"), _FLOAT),
    **dict.fromkeys(("stack_config", "warnings", "error"), _STRING),
}
CELL_COLUMNS: dict[str, str] = {
    **dict.fromkeys(("length", "depth", "depth_realised"), _FLOAT),
    **dict.fromkeys(("run_id", "model", "task", "metric", "stack", "label", "attn"), _STRING),
    "query_aware": _BOOL,
    "n": _INT,
    **dict.fromkeys(("score", "score_lo", "score_hi", "full_score", "bytes_context"), _FLOAT),
    "discriminative": "boolean",
}


def points(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per run, stack, point and mode; see COLUMNS for names and types.

    `n` counts scored examples, `n_documents` the documents they are on: intervals and tests rest on these.
    Bytes are means over the scored examples (peaks are maxima), ratios are sums over sums (stack / full, same samples,
    same moment). `label` names the stack and its budget. Columns about the full cache are over the same prompts only,
    or empty with the reason in `diff_reason`. For streams `bytes_context` and `bytes_full` are time means, the kinds are
    as held at the end, `chunk` is set, and fidelity is a mean over tokens and `nll_diff` the
    paired difference to the full cache in nats a token (both empty for other tasks). `score_first` and
    `score_later` are of the first and the later questions, where a context has several.
    """
    return _frame(point_row.rows(records), COLUMNS)


def cells(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """What `points` says of scores and bytes at each asked length and depth; records without both are left out.

    `depth_realised` is the mean depth at which the needles really are, where records know it.
    """
    return _frame(cell_rows(records), CELL_COLUMNS)


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """All rows in their order, by column name; single values are read from these far faster than from pandas' own rows."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))


def _frame(rows: list[Json], columns: dict[str, str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(columns), dtype="object" if not rows else None)
    return frame.astype(columns)
