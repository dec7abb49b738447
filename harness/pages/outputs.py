"""What a report leaves behind: of one run the files of its folder, of several one table and one page.

Each file appears whole or not at all, so a reader never sees half a table, and a failing file loses no record.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.analysis.contrast import contrasts
from harness.analysis.findings import Findings, findings
from harness.citations.bibliography import bibtex, cited, unknown
from harness.errors import UserError
from harness.files.paths import page_path
from harness.files.plain_files import printable
from harness.pages import dashboard, table
from harness.pages.facts import SPELLINGS
from harness.pages.words.together import headline, printed, together
from harness.records.atomic import replace
from harness.records.current import current_records, merged
from harness.records.progress import manifests, run_folders
from harness.records.shards import Loaded, load_records, read, shards
from harness.records.sweep_folder import is_sweep

Json = dict[str, Any]

LISTS = ("asked", "samples")  # of a manifest, as long as the run has examples
_LOG = logging.getLogger(__name__)


def write_all(run_dir: Path, manifest: Mapping[str, Any] | None = None, loaded: Loaded | None = None) -> Findings:
    """Write points.csv, points.parquet, frontier.json, dashboard.html and, for streams, curves.csv from a folder's shards.

    Args:
        run_dir: A folder with records-*.jsonl.
        manifest: What the page says about how the run was made; the newest of manifests/ when None.
        loaded: The run's records, where they were read already.

    Returns:
        What was written, for whoever shows it elsewhere.

    Raises:
        UserError: the folder or its records are missing or not ours.
    """
    records = (current_records(run_dir)[0] if loaded is None else loaded).records
    found = findings(records, run_dir)
    replace(run_dir / "points.csv", lambda path: found.points.to_csv(path, index=False))
    replace(run_dir / "points.parquet", lambda path: found.points.to_parquet(path, index=False))
    text = json.dumps(found.frontier, indent=1, allow_nan=False)
    replace(run_dir / "frontier.json", lambda path: path.write_text(text, encoding="utf-8"))
    if any(record.get("series_path") for record in records):
        replace(run_dir / "curves.csv", lambda path: found.curves.frame.to_csv(path, index=False))
    for line in found.curves.problems:
        _LOG.warning(line)
    about = _newest_manifest(run_dir) if manifest is None else _short(manifest, manifests(run_dir))
    run_ids = dict.fromkeys(record["run_id"] for record in records)
    dashboard.write(found, run_dir / "dashboard.html", dict.fromkeys(run_ids, about) if about else {})
    return found


def _newest_manifest(run_dir: Path) -> Json | None:
    """The manifest of the last invocation without its lists of examples, None where there is none that can be read."""
    known = manifests(run_dir)
    return _short(known[-1], known) if known else None


def _short(manifest: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> Json:
    """A manifest without its lists, and with how the points of all invocations of its run were asked for."""
    spelled = [one[SPELLINGS] for one in (*known, manifest) if isinstance(one.get(SPELLINGS), Mapping)]
    short = {name: value for name, value in manifest.items() if name not in LISTS}
    return short | ({SPELLINGS: {name: words for part in spelled for name, words in part.items()}} if spelled else {})


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The records of one folder that count, and what its report says beside them."""

    folder: Path
    loaded: Loaded
    stale: str | None
    manifest: Json | None

    @property
    def total(self) -> int:
        return len(self.loaded) + self.loaded.duplicates

    def records(self) -> Iterator[Json]:
        """The records, with their series named from here: those of several folders are read together."""
        for record in self.loaded:
            own = record.get("series_path")
            yield record | {"series_path": str(self.folder / own)} if own else record


def merge(folders: Sequence[Path], out: Path, against: Sequence[str] = ()) -> None:
    """Write one dashboard and print the merged table; points of different runs are never ranked against each other.

    A folder of runs is all of them, a sweep's folder the runs it names. A record that several folders hold (a copied run)
    counts once; runs that share examples keep their own records. With labels in `against`, all points are also compared
    with those, and contrasts.csv is written beside the page. Nothing is printed before all is written.

    Raises:
        UserError: a folder is missing or holds no records of ours, no point has a label of `against`, or `out` is no page.
    """
    out, said = page_path("--out", str(out), (".bib", *([".csv"] if against else []))), list[str]()
    asked = [folder for named in folders for folder in _runs(named, said)]
    runs = [run for folder in asked if (run := _run(folder, folders, said)) is not None]
    for run in runs:
        if run.loaded.half_written:
            said.append(f"{run.folder}: {run.loaded.half_written} half-written record(s) passed over")
        if run.stale:
            said.append(run.stale)
    records = merged(record for run in runs for record in run.records())
    if not records:
        raise UserError(f"no records in {', '.join(map(str, folders))}: no run there has a whole one")
    total = sum(run.total for run in runs)
    if total > len(records):
        said.append(f"{total - len(records)} earlier record(s) with the key of a later one: the latest counts")
    found, paired = findings(records), contrasts(records, against)
    stacks, tasks = ([str(name) for name in found.points[column].unique()] for column in ("stack", "task"))
    references = cited(stacks, tasks)
    bib, beside = out.with_suffix(".bib"), out.parent / "contrasts.csv"
    replace(bib, lambda path: path.write_text(bibtex(references), encoding="utf-8"))
    if against:
        replace(beside, lambda path: paired.frame.to_csv(path, index=False))
    dashboard.write(found, out, _manifests(runs))
    for line in said:
        print(printable(line))
    table.show(found.points)
    _show_joint(found)
    table.show_contrasts(paired.frame)
    for line in (*paired.problems, *found.curves.problems):
        print(printable(line))
    table.show_citations(references, unknown(stacks, tasks))
    for path in (bib, *([beside] if against else []), out):
        print(printable(str(path)))


def _show_joint(found: Findings) -> None:
    """Print the tables of several tasks or models together."""
    for one in together(found.points, found.frontier["joint"]):
        table.show_cells(one.title, printed(one), [headline(one)])


def _run(folder: Path, named: Sequence[Path], said: list[str]) -> _Run | None:
    """A run folder; of several that the user named, one without records is passed over with a line (else UserError)."""
    try:
        loaded, stale = current_records(folder, load_records(folder) if folder in named else read(folder))
    except UserError as error:
        if len(named) == 1:
            raise
        said.append(f"passed over: {error}")
        return None
    return _Run(folder=folder, loaded=loaded, stale=stale, manifest=_newest_manifest(folder))


def _manifests(runs: Sequence[_Run]) -> dict[str, Json]:
    """What is said of how each run was made, by run id."""
    return {record["run_id"]: run.manifest for run in runs if run.manifest for record in run.loaded}


def _runs(folder: Path, said: list[str]) -> list[Path]:
    """The folder itself, or the runs in it that have records; what is missing or a sweep's dead jobs left empty is said."""
    if any(folder.glob("records-*.jsonl")) or not (is_sweep(folder) or any(folder.glob("*/manifests"))):
        return [folder]
    found = run_folders(folder)
    for run in found:
        if not shards(run):
            said.append(f"{run}: {'no records' if run.is_dir() else 'there is no such folder'}")
    return [run for run in found if shards(run)]
