"""Everything a run folder holds beside its records, made again from them; it knows no model and runs nothing.

Each file appears whole or not at all, so a reader never sees half a table, and a failing file loses no record.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.curves import Curves, curves
from harness.analysis.frontier import frontier, rank
from harness.analysis.points import points
from harness.pages import dashboard
from harness.records.atomic import replace
from harness.records.current import current_records
from harness.records.progress import manifests

LISTS = ("asked", "samples")
_LOG = logging.getLogger(__name__)


def write_all(run_dir: Path, manifest: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Write points.csv, points.parquet, frontier.json, dashboard.html and, for streams, curves.csv from a folder's shards.

    Args:
        run_dir: A folder with records-*.jsonl.
        manifest: What the page says about how the run was made; the newest of manifests/ when None.

    Returns:
        The points table with `on_frontier` and `left_out`, ready for `table.show`.

    Raises:
        UserError: the folder or its records are missing or not ours.
    """
    records = current_records(run_dir)[0].records
    ranked = rank(points(records))
    replace(run_dir / "points.csv", lambda path: ranked.to_csv(path, index=False))
    replace(run_dir / "points.parquet", lambda path: ranked.to_parquet(path, index=False))
    text = json.dumps(frontier(ranked), indent=1, allow_nan=False)
    replace(run_dir / "frontier.json", lambda path: path.write_text(text, encoding="utf-8"))
    found = newest_manifest(run_dir) if manifest is None else {k: v for k, v in manifest.items() if k not in LISTS}
    run_ids = dict.fromkeys(record["run_id"] for record in records)
    streams = _write_curves(run_dir, records, ranked)
    dashboard.write(records, run_dir / "dashboard.html", dict.fromkeys(run_ids, found) if found else None, streams, ranked)
    return ranked


def _write_curves(run_dir: Path, records: list[dict[str, Any]], ranked: pd.DataFrame) -> Curves | None:
    if not any(record.get("series_path") for record in records):
        return None
    found = curves(run_dir, records, ranked)
    replace(run_dir / "curves.csv", lambda path: found.frame.to_csv(path, index=False))
    for line in found.problems:
        _LOG.warning(line)
    return found


def newest_manifest(run_dir: Path) -> dict[str, Any] | None:
    """The manifest of the last invocation without its lists of examples, None where there is none that can be read."""
    newest = next(reversed(manifests(run_dir)), None)
    return newest and {name: value for name, value in newest.items() if name not in LISTS}
