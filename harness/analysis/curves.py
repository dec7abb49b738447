"""Perplexity by position: token-by-token series of a stream run to one typed table.

A row is one bucket of positions of one stack at one point, over all scored documents of its run. Buckets are the same
for every stack of a run, so lines can be laid over each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.analysis.point_measures import number
from harness.analysis.point_row import CONFIGURATION, configuration, example_of, is_scored
from harness.files.plain_files import kind, read_plain

Record = Mapping[str, Any]
Floats = NDArray[np.float64]

WIDTH = 64  # tokens of the smallest bucket
MOST_BUCKETS = 64  # a longer stream gets wider buckets
COLUMNS: dict[str, str] = {
    **dict.fromkeys(("run_id", "model", "task"), "string"),
    "query_aware": "bool",
    **dict.fromkeys(("attn", "stack", "point", "label"), "string"),
    **dict.fromkeys(("start", "stop"), "int64"),
    "position": "float64",
    **dict.fromkeys(("tokens", "documents"), "int64"),
    **dict.fromkeys(("nll", "perplexity", "kl"), "float64"),
}
_NAMED = ("run_id", "model", "task", "query_aware", "attn", "stack", "point")
_SERIES = ("position", "nll", "kl")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The table (see COLUMNS) and a line for every kind of series file that could not be read."""

    frame: pd.DataFrame
    problems: list[str]


class _UnreadableError(Exception):
    """A series file that is missing or not ours; the text says which."""


def curves(folder: Path, records: Iterable[Record], points: pd.DataFrame) -> Curves:
    """Perplexity by position bucket from the series files that the records of a run name.

    `start` and `stop` are positions in the document (stop excluded), `position` is their mean over the bucket's tokens,
    `nll` the mean negative log-likelihood of those tokens in nats, `perplexity` its exponential, `kl` the mean KL
    divergence from the full cache in nats. A last bucket of less than half the width joins the one before it.

    Args:
        folder: What `series_path` of the records is relative to.
        records: Records of one or several runs; those without a series are passed over.
        points: The points table of the same records, for the labels.
    """
    groups = _by_configuration(records)
    labels = {tuple(row): label for *row, label in points[[*CONFIGURATION, "label"]].itertuples(index=False)}
    longest: dict[str, int] = defaultdict(int)
    for record in (one for group in groups.values() for one in group):
        longest[record["run_id"]] = max(longest[record["run_id"]], record["n_prompt"])
    faults: dict[str, list[str]] = defaultdict(list)
    rows = []
    for key, group in groups.items():
        named = {name: group[0][name] for name in _NAMED} | {"point": key[CONFIGURATION.index("point")], "label": labels[key]}
        rows += [named | bucket for bucket in _buckets(folder, group, longest[group[0]["run_id"]], faults)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype="object" if not rows else None).astype(COLUMNS)
    return Curves(frame=frame, problems=[_line(fault, paths) for fault, paths in faults.items()])


def bucket_width(tokens: int) -> int:
    """Tokens of a bucket for documents of that many tokens: 64, doubled until at most 64 buckets are left."""
    width = WIDTH
    while width * MOST_BUCKETS < tokens:
        width *= 2
    return width


def _by_configuration(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    latest: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in records:
        latest[configuration(record)][example_of(record)] = record
    kept = {key: [r for r in group.values() if r.get("series_path") and is_scored(r)] for key, group in latest.items()}
    return {key: group for key, group in kept.items() if group}


def _buckets(folder: Path, group: list[Record], longest: int, faults: dict[str, list[str]]) -> list[dict[str, Any]]:
    width = bucket_width(longest)
    count = max((longest + width // 2) // width, 1)
    sums, documents = np.zeros((4, count)), np.zeros(count, dtype=np.int64)
    for record in group:
        path = folder / record["series_path"]
        try:
            position, nll, kl = _series(path, record)
        except _UnreadableError as fault:
            faults[str(fault)].append(str(path))
            continue
        bucket = np.minimum(position.astype(np.int64) // width, count - 1)
        weights = (np.ones(len(bucket)), position, nll, kl)
        sums += np.stack([np.bincount(bucket, values, minlength=count) for values in weights])
        documents[np.unique(bucket)] += 1
    stops = [(i + 1) * width for i in range(count - 1)] + [longest]
    held = [i for i in range(count) if sums[0, i]]
    with np.errstate(over="ignore"):  # a broken cache has an infinite perplexity, which is a result
        return [_bucket(sums[:, i], i * width, stops[i], int(documents[i])) for i in held]


def _bucket(sums: Floats, start: int, stop: int, documents: int) -> dict[str, Any]:
    tokens, position, nll, kl = sums
    return {
        "start": start,
        "stop": stop,
        "position": position / tokens,
        "tokens": int(tokens),
        "documents": documents,
        "nll": nll / tokens,
        "perplexity": float(np.exp(nll / tokens)),
        "kl": kl / tokens,
    }


def _series(path: Path, record: Record) -> tuple[Floats, Floats, Floats]:
    """(position, nll, kl) of a file, each (tokens scored,)."""
    if kind(path.parent) == "" or kind(path) == "":
        raise _UnreadableError("missing")
    if kind(path.parent) != "a folder" or kind(path) != "file":
        raise _UnreadableError("not a plain file of this run")
    try:
        frame = pd.read_parquet(BytesIO(read_plain(path)), columns=list(_SERIES)).astype("float64")
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError):
        raise _UnreadableError(f"not a series of this program: expected a parquet file of {', '.join(_SERIES)}") from None
    position, nll, kl = (frame[name].to_numpy() for name in _SERIES)
    inside = bool(((position >= 0) & (position < record["n_prompt"])).all())
    if not inside or len(nll) != record["weight"] or not np.isclose(nll.mean(), number(record["score"]), rtol=1e-4):
        raise _UnreadableError("not of the record that names it: other tokens or another mean than its score")
    return position, nll, kl


def _line(fault: str, paths: list[str]) -> str:
    files = "1 series file is" if len(paths) == 1 else f"{len(paths)} series files are"
    return f"{files} {fault}; left out of the curves (first: {paths[0]})"
