"""Records to points: reading the shards of a run and one typed row per configuration; it draws and ranks nothing.

A row is what one stack at one point did on all its examples of one run: score with interval, paired difference to the
full cache of the same run on the same prompts, and the bytes it held. Every column has one type, so a table can
always be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.run import point_row
from harness.run.point_measures import FIDELITY
from harness.types import BYTE_KINDS, SCHEMA, UserError

Json = dict[str, Any]

_STRING, _INT, _FLOAT, _BOOL = "string", "int64", "float64", "bool"
COLUMNS: dict[str, str] = {
    **dict.fromkeys(("run_id", "model", "task", "metric", "stack", "point", "label"), _STRING),
    "query_aware": _BOOL,
    **dict.fromkeys(("positions", "phase", "attn", "seeds", "storage", "budget_unit"), _STRING),
    "budget_value": _FLOAT,
    "n": _INT,
    **dict.fromkeys(("n_prompts", "n_failed", "n_refused", "n_not_exercised", "n_truncated", "n_unscored"), _INT),
    "n_superseded": _INT,
    **dict.fromkeys(("score", "score_lo", "score_hi", "full_score", "full_lo", "full_hi"), _FLOAT),
    **dict.fromkeys(("diff_to_full", "diff_lo", "diff_hi", "mcnemar_p"), _FLOAT),
    **dict.fromkeys(("diff_reason", "vs_full", "aggregate"), _STRING),
    "higher_is_better": _BOOL,
    "chance": _FLOAT,
    "discriminative": "boolean",
    **dict.fromkeys(("bytes_context", "bytes_full", "ratio", "bytes_final", "bytes_full_final", "ratio_final"), _FLOAT),
    **dict.fromkeys(("bytes_peak", "bytes_peak_prefill", "bytes_logical"), _FLOAT),
    "peak_exceeds_full": _BOOL,
    **{f"{sort}_{kind}": _FLOAT for sort in ("allocated", "logical") for kind in BYTE_KINDS},
    **dict.fromkeys(("tokens_seen", "tokens_kept", "effective_bits", "chunk"), _FLOAT),
    **dict.fromkeys((*FIDELITY, "answer_flips"), _FLOAT),
    **dict.fromkeys(("stack_config", "error"), _STRING),
}
CELL_COLUMNS: dict[str, str] = {"length": _FLOAT, "depth": _FLOAT} | COLUMNS


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The records of a run folder, the latest of each key, and what was passed over on the way."""

    records: list[Json]
    duplicates: int  # earlier records with the key of a later one
    half_written: int  # lines cut off by a kill

    def __iter__(self) -> Iterator[Json]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def load_records(run_dir: Path) -> Loaded:
    """Read all shards of a run folder, oldest first; of records with one key the latest wins.

    A line that a kill cut short is passed over and counted. Files that are not ours are refused in one line.

    Raises:
        UserError: no such folder, no shard in it, or a shard that no run wrote.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder: name a run folder such as results/<run_id>")
    shards = sorted(run_dir.glob("records-*.jsonl"), key=lambda shard: (shard.stat().st_mtime_ns, shard.name))
    if not shards:
        raise UserError(f"{run_dir} holds no records: expected records-<writer>.jsonl in it")
    latest: dict[str, Json] = {}
    seen = cut = 0
    for shard in shards:
        for number, line in enumerate(shard.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            record = _parse(line, f"{shard}:{number}")
            if record is None:
                cut += 1
                continue
            seen += 1
            latest.pop(record["key"], None)  # the later record also takes the later place
            latest[record["key"]] = record
    return Loaded(records=list(latest.values()), duplicates=seen - len(latest), half_written=cut)


def points(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per run, stack, point and mode; see COLUMNS for names and types.

    Bytes are means over the scored examples (peaks are maxima), ratios are sums over sums (stack / full, same samples,
    same moment). `label` names the stack and its budget. Columns about the full cache are over the same prompts only,
    or empty with the reason in `diff_reason`. For streams `bytes_context` and `bytes_full` are time means, the kinds are
    as held at the end, `chunk` is set, and fidelity is a mean over tokens (empty for other tasks).
    """
    return _frame(point_row.rows(records), COLUMNS)


def cells(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """As `points`, split further by asked length and depth; records without both are left out."""
    placed = [r for r in records if r.get("length") is not None and r.get("depth") is not None]
    return _frame(point_row.rows(placed, split=("length", "depth")), CELL_COLUMNS)


def _frame(rows: list[Json], columns: dict[str, str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(columns), dtype="object" if not rows else None)
    return frame.astype(columns)


def _parse(line: bytes, where: str) -> Json | None:
    """The record of a line, None for one cut short; NaN of older files is read as missing."""
    try:
        record = json.loads(line, parse_constant=_constant)
    except ValueError:
        if line.lstrip().startswith(b"{"):
            return None
        raise UserError(f"{where} is not a record: expected one JSON object a line") from None
    if not isinstance(record, dict) or not {"key", "schema", "run_id", "stack"} <= record.keys():
        raise UserError(f"{where} is not a record of this program: key, schema, run_id or stack is missing")
    if record["schema"] != SCHEMA:
        raise UserError(f"{where} has schema={record['schema']!r}: this version reads {SCHEMA}")
    return record


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)
