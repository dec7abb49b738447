"""Which records of a run folder are this run's: of examples, settings and a model as its last invocation found them.

Tables, points, pages and checks all read a folder through here, so that they speak of the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from harness.files.json_values import Json
from harness.records.progress import arm_name, manifests, samples
from harness.records.shards import Loaded, latest, load_records, read

ANOTHER = "made by another version (of the code, a library or the model)"


def current_records(folder: Path, loaded: Loaded | None = None) -> tuple[Loaded, str | None]:
    """The run's records (of those `loaded` from its folder), and one line on those that are not its any more, else None.

    A file of questions edited under its name, or other weights under the same path, make records stale: their example is
    gone, or another one has its id. Jsons under older code stay, as do those beyond the last invocation's limit.

    Raises:
        UserError: the folder or its records are missing or not ours.
    """
    loaded, known = load_records(folder) if loaded is None else loaded, samples(manifests(folder))
    kept = [record for record in loaded if not _stale(record, known)]
    stale = len(loaded) - len(kept)
    line = f"{folder}: {stale} stale record(s), of examples or a model that are not the same any more: left out everywhere"
    return replace(loaded, records=kept), line if stale else None


def _stale(record: Json, known: Mapping[str, Mapping[str, str]]) -> bool:
    ids = known.get(str(record["seed"]))
    if ids is None:
        return False
    now, then = ids.get(str(record["example_id"])), record["sample_sha256"]
    return now is None or bool(then and then != now)  # older records do not say


def other_version(folder: Path, asked: Mapping[str, tuple[int, str, str]]) -> str | None:
    """One line where the folder holds records of what is asked for under other keys, else None.

    Nothing that a record names is imported: what was asked for is known by its names alone.

    Args:
        folder: the run folder, the manifest of this invocation in it.
        asked: seed, example and arm by key.
    """
    wanted = set(asked.values())
    others = [record for record in current_records(folder, read(folder))[0] if record["key"] not in asked]
    n = sum((record["seed"], str(record["example_id"]), arm_name(record)) in wanted for record in others)
    return f"{n} record(s) of this run were {ANOTHER}: they stay, and are made again here" if n else None


def merged(records: Iterable[Json]) -> list[Json]:
    """Jsons of several folders, the latest of each run and key: runs that ask the same of a model keep their own."""
    runs: dict[str, list[Json]] = {}
    for record in records:
        runs.setdefault(record["run_id"], []).append(record)
    return [record for run in runs.values() for record in latest(run)]
