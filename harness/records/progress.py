"""How far a run folder is, from its manifests and records alone; it changes nothing and prints nothing.

What was asked for is in the manifests (digests of examples and arms), what is there in the records.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from harness.errors import UserError
from harness.files.json_values import Config, Json
from harness.files.plain_files import kind, read_plain, say_once
from harness.records.claims import held
from harness.records.keys import record_key
from harness.records.schema import manifest_fault
from harness.records.shards import read
from harness.records.sweep_folder import is_sweep, runs


@dataclass(frozen=True, kw_only=True)
class ArmState:
    """One stack at one point: how many of its records are there, by status, and how many are still to be made."""

    name: str
    ok: int
    refused: int
    failed: int
    missing: int


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run folder: its arms, who works on it, and how fast (None where nothing was made since the last start)."""

    folder: Path
    arms: tuple[ArmState, ...]
    redo_failed: int  # finished records that could not be made again since
    writers: int  # processes at work
    examples_per_s: float | None
    records_per_s: float | None

    def total(self, name: str) -> int:
        """A count over all arms: ok, refused, failed or missing."""
        return sum(getattr(arm, name) for arm in self.arms)

    @property
    def seconds_left(self) -> float | None:
        """Until nothing is missing, at the present pace."""
        return self.total("missing") / self.records_per_s if self.records_per_s else None


def run_folders(folder: Path) -> list[Path]:
    """The folder itself where it is a run's, else the runs in it, or those that a sweep's names (there or not any more).

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name results/<run_id>, a folder of such, or a sweep's")
    if (folder / "manifests").is_dir():
        return [folder]
    if is_sweep(folder):
        return runs(folder)
    found = sorted(path.parent for path in folder.glob("*/manifests"))
    if not found:
        raise UserError(f"{folder} holds no run: expected {folder}/manifests, {folder}/*/manifests or {folder}/sweep.json")
    return found


def manifests(folder: Path, without: Collection[str] = ()) -> list[Json]:
    """The manifests of a run, oldest first, but those of these file names; what cannot be read is named and passed over."""
    place = folder / "manifests"
    if kind(place) not in ("", "a folder"):
        say_once(f"{place} is {kind(place)}, not a folder of this run: it is left alone")
        return []
    found = []
    for path in sorted(place.glob("*.json")):
        manifest, fault = ({}, "") if path.name in without else _manifest(path)
        if fault:
            say_once(f"{path} is no manifest: {fault}; passed over")
        elif manifest:
            found.append(manifest)
    return found


def _manifest(path: Path) -> tuple[Json, str]:
    """A manifest, and why it cannot be read."""
    try:
        data = read_plain(path)
        manifest = json.loads(data)
    except OSError as error:
        return {}, str(error.strerror)
    except (ValueError, RecursionError):
        return {}, "it is not JSON"
    return manifest, manifest_fault(manifest, data)


def samples(invocations: Sequence[Json]) -> dict[str, dict[str, str]]:
    """Digests of the examples that there are, by seed and id, as the last invocation with that seed found them."""
    known: dict[str, dict[str, str]] = {}
    for manifest in invocations:
        found = manifest.get("samples")
        known |= {seed: ids for seed, ids in found.items() if isinstance(ids, dict)} if isinstance(found, dict) else {}
    return known


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a run folder held at a moment: clocks of several machines cannot tell what came after it, this can."""

    manifests: frozenset[str] = frozenset()  # their file names
    tries: Mapping[str, int] = field(default_factory=dict)  # records of every key

    def new(self, tries: Mapping[str, int]) -> set[str]:
        """Keys that have more tries than at that moment."""
        return {key for key, times in tries.items() if times > self.tries.get(key, 0)}


def snapshot(folder: Path) -> Snapshot:
    """What a run folder holds now; nothing where there is none."""
    names = (path.name for path in (folder / "manifests").glob("*.json"))
    return Snapshot(manifests=frozenset(names), tries=read(folder).tries) if folder.is_dir() else Snapshot()


def asked_since(folder: Path, before: Snapshot) -> set[str]:
    """Keys of the records that later invocations asked for."""
    return {key for keys in _asked(manifests(folder, before.manifests)).values() for key in keys}


def state(folder: Path, now: datetime | None = None) -> RunState:
    """How far a run is.

    Raises:
        UserError: a file of it may not be read.
    """
    invocations = manifests(folder)
    loaded = read(folder)
    status = {record["key"]: str(record["status"]) for record in loaded}
    keys = _asked(invocations) if not invocations or any("asked" in one for one in invocations) else _there(loaded)
    arms = tuple(_arm(name, [status.get(key, "") for key in of]) for name, of in keys.items())
    living = [one for one in invocations if held(folder / "claims", str(one.get("writer", "")))]
    examples, made = _pace(loaded.records, living or invocations[-1:], now or datetime.now(timezone.utc), bool(living))
    return RunState(
        folder=folder,
        arms=arms,
        redo_failed=len(loaded.redo_failed & set().union(*keys.values())),
        writers=len(living),
        examples_per_s=examples,
        records_per_s=made,
    )


def _listed(manifest: Json) -> tuple[list[tuple[str, str]], list[tuple[object, object, str]]]:
    """(arms, examples) that an invocation asked for, each with its digest; none where the manifest does not say (schema 1)."""
    asked = manifest.get("asked") or {"examples": []}
    arms = asked.get("arms", asked.get("cells", []))  # the older word
    return [(name, part) for name, part in arms], [(seed, name, part) for seed, name, part in asked["examples"]]


def _asked(invocations: Sequence[Json]) -> dict[str, list[str]]:
    """Keys by arm, over all invocations, of examples that there still are; one asked for again under new code counts once."""
    latest: dict[str, dict[tuple[object, object], str]] = {}
    known = samples(invocations)
    for manifest in invocations:
        arms, examples = _listed(manifest)
        for name, arm in arms:
            keys = latest.setdefault(name, {})
            for seed, example, digest in examples:
                if str(seed) not in known or str(example) in known[str(seed)]:
                    keys[seed, example] = record_key(digest, arm)
    return {name: list(keys.values()) for name, keys in latest.items()}


def _there(records: Iterable[Json]) -> dict[str, list[str]]:
    """Keys by arm of the records that there are, for a folder whose manifests do not say what was asked for."""
    found: dict[str, dict[tuple[object, object], str]] = {}
    for record in records:
        found.setdefault(arm_name(record), {})[_example(record)] = record["key"]
    return {name: list(keys.values()) for name, keys in found.items()}


def arm_name(record: Config) -> str:
    """The name of a record's arm, as `Arm.name` and manifests have it."""
    return str(record["stack"]) + "".join(f" {key}={value}" for key, value in record["point"].items())


def _arm(name: str, found: Sequence[str]) -> ArmState:
    count = Counter("ok" if one in ("ok", "not_exercised") else one for one in found)
    return ArmState(
        name=name, ok=count["ok"], refused=count["refused"], failed=count["failed"], missing=len(found) - sum(map(bool, found))
    )


def _pace(records: Sequence[Json], since: Sequence[Json], now: datetime, running: bool) -> tuple[float | None, float | None]:
    """(examples, records) a second since the oldest of these invocations began: until now, or until the last record."""
    if not since:
        return None, None
    start = min(str(manifest["time"]) for manifest in since)
    made = [record for record in records if str(record["written_at"])[:19] >= start[:19]]
    if not made:
        return None, None
    end = now if running else datetime.fromisoformat(max(str(record["written_at"]) for record in made))
    seconds = max((end - datetime.fromisoformat(start)).total_seconds(), 1e-3)
    return len(set(map(_example, made))) / seconds, len(made) / seconds


def _example(record: Config) -> tuple[object, object]:
    return record["seed"], record["example_id"]
