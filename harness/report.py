"""The command `python -m harness.report RUN... --out F`: one table and one page from several run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.run import dashboard, table
from harness.run.atomic import replace
from harness.run.contrast import contrasts
from harness.run.curves import curves
from harness.run.pareto import rank
from harness.run.points import points
from harness.run.progress import run_folders
from harness.run.report import newest_manifest
from harness.run.shards import latest, load_records
from harness.run.sweep_folder import is_sweep
from harness.types import UserError


def merge(folders: Sequence[Path], out: Path, against: Sequence[str] = ()) -> None:
    """Print the merged table and write one dashboard; points of different runs are never ranked against each other.

    A folder of runs stands for all of them, a sweep's folder for the runs it names. A record that stands in several folders
    (a copied run) counts once. With labels in `against`, all points are also compared with those, and contrasts.csv is
    written beside the page.

    Raises:
        UserError: a folder is missing or holds no records of ours, or no point has a label of `against`.
    """
    found_records: list[dict[str, Any]] = []
    manifests: dict[str, dict[str, Any]] = {}
    total = 0
    for folder in [run for named in folders for run in _runs(named)]:
        loaded = load_records(folder)
        total += len(loaded) + loaded.duplicates
        found_records += [_located(record, folder) for record in loaded]
        manifest = newest_manifest(folder)
        if manifest is not None:
            manifests |= {record["run_id"]: manifest for record in loaded}
        if loaded.half_written:
            print(f"{folder}: {loaded.half_written} half-written record(s) passed over")
    records = latest(found_records)
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
        print(line)
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
        if not any(run.glob("records-*.jsonl")):
            print(f"{run}: {'no records' if run.is_dir() else 'there is no such folder'}")
    return [run for run in found if any(run.glob("records-*.jsonl"))]


def _located(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record with its series named from here, where those of several folders are read together."""
    own = record.get("series_path")
    return record | {"series_path": str(folder / own)} if own else record


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="Merge runs into one table and page.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders such as results/<run_id>, folders of them, or a sweep's"
    )
    parser.add_argument("--out", type=Path, default=Path("dashboard.html"), metavar="F", help="page to write")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="LABEL",
        help="also compare all points with this one, paired (repeatable)",
    )
    options = parser.parse_args(arguments)
    try:
        merge(options.runs, options.out, options.against)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
