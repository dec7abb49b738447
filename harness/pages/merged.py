"""Several runs in one table and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.analysis.contrast import contrasts
from harness.analysis.curves import curves
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.errors import UserError
from harness.files.plain_files import printable
from harness.pages import dashboard, table
from harness.pages.run_folder import newest_manifest
from harness.records.atomic import replace
from harness.records.current import current_records, merged
from harness.records.progress import run_folders
from harness.records.shards import load_records, read, shards
from harness.records.sweep_folder import is_sweep


def merge(folders: Sequence[Path], out: Path, against: Sequence[str] = ()) -> None:
    """Print the merged table and write one dashboard; points of different runs are never ranked against each other.

    A folder of runs stands for all of them, a sweep's folder for the runs it names. A record that stands in several folders
    (a copied run) counts once; runs that share examples keep their own records. With labels in `against`, all points are
    also compared with those, and contrasts.csv is written beside the page.

    Raises:
        UserError: a folder is missing or holds no records of ours, or no point has a label of `against`.
    """
    found_records: list[dict[str, Any]] = []
    manifests: dict[str, dict[str, Any]] = {}
    total = 0
    for folder in [run for named in folders for run in _runs(named)]:
        loaded, stale = current_records(folder, load_records(folder) if folder in folders else read(folder))
        total += len(loaded) + loaded.duplicates
        found_records += [_located(record, folder) for record in loaded]
        manifest = newest_manifest(folder)
        if manifest is not None:
            manifests |= {record["run_id"]: manifest for record in loaded}
        if loaded.half_written:
            print(f"{folder}: {loaded.half_written} half-written record(s) passed over")
        if stale:
            print(stale)
    records = merged(found_records)
    if not records:
        raise UserError(f"no records in {', '.join(map(str, folders))}: no run there has a whole one")
    if total > len(records):
        print(f"{total - len(records)} earlier record(s) with the key of a later one: the latest counts")
    ranked = rank(points(records))
    found = curves(Path(), records, ranked)
    paired = contrasts(records, against)
    table.show(ranked)
    table.show_contrasts(paired.frame)
    for line in (*paired.problems, *found.problems):
        print(printable(line))
    if against:
        beside = out.parent / "contrasts.csv"
        replace(beside, lambda path: paired.frame.to_csv(path, index=False))
        print(beside)
    dashboard.write(records, out, manifests, found, ranked)
    print(out)


def _runs(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it that have records; what is missing or a sweep's dead jobs left empty is named."""
    if any(folder.glob("records-*.jsonl")) or not (is_sweep(folder) or any(folder.glob("*/manifests"))):
        return [folder]
    found = run_folders(folder)
    for run in found:
        if not shards(run):
            print(f"{run}: {'no records' if run.is_dir() else 'there is no such folder'}")
    return [run for run in found if shards(run)]


def _located(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record with its series named from here, where those of several folders are read together."""
    own = record.get("series_path")
    return record | {"series_path": str(folder / own)} if own else record
