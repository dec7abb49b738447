"""What run folders know of points: units and bytes by run and mode, and across tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.advice.engine_flags import flag
from harness.advice.guarantee import Candidate
from harness.advice.loss_units import Record, bounded, units
from harness.analysis.labels import mode
from harness.analysis.point_measures import mean, number, without_bytes
from harness.analysis.point_row import BASE, Point, configurations, example_of
from harness.files.plain_files import say_once
from harness.records.current import current_records
from harness.records.progress import manifests

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A point as a candidate, and what its bytes at another length can be planned from.

    Attributes:
        candidate: label, mean context bytes over its examples, units.
        score: mean score; NaN where none.
        ratio: bytes to those of the full cache of the same examples.
        stack_config: the resolved stack at this point.
        flag: the nearest setting of a serving engine, where there is one.
    """

    candidate: Candidate
    score: float
    ratio: float
    stack_config: Mapping[str, Any]
    flag: str | None = None

    @property
    def key(self) -> str:
        """What the same stack at the same point has in every run."""
        return json.dumps(self.stack_config, sort_keys=True, default=str)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Points of one model, task and mode of one run.

    Attributes:
        arms: smaller than the full cache or not, without the full cache itself. left_out: those that say nothing, and why.
        full_score: mean score of the full cache; longest: tokens of the longest context scored.
        peeked: whether any invocation chose its number of examples while looking (`limit=auto`).
        bounded: whether scores are shares, so that a loss has a guarantee at all. higher_is_better: of the score.
        manifest: of the last invocation.
    """

    folder: Path
    model: str
    task: str
    mode: str
    arms: tuple[Arm, ...]
    left_out: tuple[str, ...]
    full_score: float
    longest: int
    peeked: bool
    bounded: bool
    higher_is_better: bool
    manifest: Json

    @property
    def title(self) -> str:
        """Model, task and mode."""
        return f"{self.model} · {self.task} · {self.mode}"


def evidence(folders: Iterable[Path]) -> list[Evidence]:
    """The evidence of run folders, each once, in their order; UserError for a folder that is none of ours."""
    found: list[Evidence] = []
    for folder in {path.resolve(): path for path in folders}.values():
        loaded, stale = current_records(folder)
        if stale:
            say_once(stale)
        records = loaded.records
        about = manifests(folder)
        runs: dict[tuple[Any, ...], list[Point]] = {}
        for point in configurations(records):
            runs.setdefault(point.run, []).append(point)
        found += [_of_run(folder, points, about[-1] if about else {}) for points in runs.values()]
    return found


def _of_run(folder: Path, points: Sequence[Point], manifest: Json) -> Evidence:
    base = {key: record for point in points if point.first["stack"] == BASE for key, record in point.latest.items()}
    first = points[0].first
    why = {point.label: _says_nothing(point) for point in points if point.first["stack"] != BASE}
    scored = [record for point in points for record in point.scored.values()]
    full = [number(record["score"]) for point in points if point.first["stack"] == BASE for record in point.scored.values()]
    return Evidence(
        folder=folder,
        model=str(first["model"]),
        task=str(first["task"]),
        mode=mode(first),
        arms=tuple(_arm(point, base) for point in points if why.get(point.label) == ""),
        left_out=tuple(f"{label}: {reason}" for label, reason in why.items() if reason),
        full_score=mean(full),
        longest=max((int(record["tokens_seen"]) for record in scored), default=0),
        peeked=any(point.adaptive for point in points),
        bounded=all(map(bounded, scored)),
        higher_is_better=bool(first["higher_is_better"]),
        manifest=manifest,
    )


def _says_nothing(point: Point) -> str:
    """Why a point is no candidate; "" where it is one. Without any score it is one that lacks evidence."""
    scored = list(point.scored.values())
    if lacking := sum(map(without_bytes, scored)):
        return f"bytes of {lacking} of {len(scored)} examples are missing or not above zero"
    if scored and all(record["status"] == "not_exercised" for record in scored):
        return "nothing was compressed on any of its examples"
    return ""


def _arm(point: Point, base: Mapping[Any, Record]) -> Arm:
    scored = list(point.scored.values())
    nbytes = mean([number(record["kv_bytes_context"]) for record in scored])
    full = [base[example_of(record)] for record in scored if example_of(record) in base]
    whole = mean([number(record["kv_bytes_context"]) for record in full])
    known = units(point, base) if scored else None
    return Arm(
        candidate=Candidate(point.label, nbytes, known if known is not None and known.n else None, str(point.first["stack"])),
        score=mean([number(record["score"]) for record in scored]),
        ratio=nbytes / whole if whole > 0 else math.nan,
        stack_config=point.first["stack_config"],
        flag=flag(point.first["stack_config"], point.first["codec_info"]),
    )


def joint(found: Sequence[Evidence]) -> Iterator[list[Arm]]:
    """The arms that every one of these has, as they are in each: what can be recommended for all of them at once."""
    known = [{arm.key: arm for arm in one.arms} for one in found]
    for key in known[0] if known else ():
        if all(key in arms for arms in known):
            yield [arms[key] for arms in known]
