"""One row of the points table from the records of one configuration.

Pairing rule: a difference to the full cache, or to another point, is only taken within one run, over the same examples
with the same prompt hash and seed, under the same attention function. Otherwise it is empty and a text says why.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.intervals import UNKNOWN, Estimate, Sample, difference, estimate, verdict
from harness.analysis.labels import budget_of, label_of
from harness.analysis.point_measures import (
    answer_flips,
    by_order,
    chance_of,
    discriminative,
    effective_bits,
    fidelity,
    number,
    sizes,
    without_bytes,
)
from harness.analysis.point_warnings import is_empty, warnings
from harness.files.digests import place
from harness.records.failures import bare

Record = Mapping[str, Any]

BASE = "full"
IDENTITY = ("run_id", "model", "task", "query_aware", "stack", "positions", "phase", "attn")
CONFIGURATION = (*IDENTITY, "point", "stack_config")
RUN_GROUP = ("run_id", "model", "task", "query_aware", "attn")
_NO_SCORE = Estimate(math.nan, UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The records of one configuration of one run, and what the points table calls it there.

    `latest` and `scored` are by `example_of`; a re-run under new code replaces the old answer.
    """

    label: str
    run: tuple[Any, ...]  # values of RUN_GROUP, then of the split; labels are unique within
    extra: tuple[Any, ...]  # values of the split alone
    group: list[Record]
    latest: dict[Any, Record]
    scored: dict[Any, Record]
    adaptive: bool = False  # whether how many there are was decided while looking at results

    @property
    def first(self) -> Record:
        """A record for what all have in common; one without an answer may not know how it is scored."""
        return next(reversed(self.scored.values()), self.group[-1])


class Comparison(NamedTuple):
    """A point beside another one on the point's examples; `reason` says why there is no difference."""

    score: Estimate
    other: Estimate
    paired: Estimate  # score minus other
    reason: str | None = None
    shared: Sequence[Any] = ()  # examples that both were scored on
    nats: Estimate = _NO_SCORE  # the same of negative log-likelihoods per token, where scores are perplexities

    def verdict(self, *, higher_is_better: bool) -> str:
        """How the point compares with the other: perplexities by their difference in nats, which the tables print.

        Other scores that fall as they get better have no fixed scale.
        """
        in_nats = math.isfinite(self.paired.value) and math.isfinite(self.nats.value)
        paired, relative = (self.nats, False) if in_nats else (self.paired, not higher_is_better)
        return verdict(self.score, self.other, paired, higher_is_better=higher_is_better, relative=relative)


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of all configurations in the order they first appear."""
    records = list(records)
    bases: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in records:
        if record["stack"] == BASE:
            bases[tuple(record[name] for name in RUN_GROUP)][example_of(record)] = record
    return [_row(point, bases.get(point.run, {})) for point in configurations(records)]


def configurations(records: Iterable[Record], split: Sequence[str] = ()) -> list[Point]:
    """The points of these records in the order they first appear; those that would read alike get a number."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    records = list(records)
    adaptive = {tuple(record[name] for name in RUN_GROUP) for record in records if record.get("adaptive")}
    for record in records:
        groups[(*configuration(record), *(record[name] for name in split))].append(record)
    found = []
    taken: dict[tuple[Any, ...], int] = defaultdict(int)
    for group in groups.values():
        latest = {example_of(record): record for record in group}
        scored = {example: record for example, record in latest.items() if is_scored(record)}
        run = tuple(group[0][name] for name in (*RUN_GROUP, *split))
        looked, extra = run[: len(RUN_GROUP)] in adaptive, run[len(RUN_GROUP) :]
        scored = dict(sorted(scored.items(), key=_as_asked)) if looked else scored
        point = Point(label="", run=run, extra=extra, group=group, latest=latest, scored=scored, adaptive=looked)
        label = label_of(point.first)
        taken[(*run, label)] += 1
        same = taken[(*run, label)]
        found.append(replace(point, label=label if same == 1 else f"{label} #{same}"))
    return found


def _row(point: Point, base: dict[Any, Record]) -> dict[str, Any]:
    first, scored, latest = point.first, point.scored, point.latest
    budget = budget_of(first)
    found = _against_full(point, base)
    lower = not first["higher_is_better"]
    chance = chance_of(list(scored.values()) or point.group, first["aggregate"])
    return {
        **{name: first[name] for name in ("run_id", "model", "task", "metric", "stack", "query_aware", "positions")},
        **{name: first[name] for name in ("phase", "attn", "storage", "aggregate", "higher_is_better")},
        "chance": chance,
        "point": _json(first["point"]),
        "stack_config": _json(first["stack_config"]),
        "seeds": ",".join(str(seed) for seed in sorted({record["seed"] for record in latest.values()})),
        "budget_value": budget.value,
        "budget_unit": budget.unit,
        "label": point.label,
        **_counts(point),
        "adaptive": point.adaptive,
        **spread("score", found.score),
        **spread("full", found.other, value="full_score"),
        **spread("diff", found.paired, value="diff_to_full"),
        **spread("nll_diff", found.nats),
        "mcnemar_p": found.paired.p_value if found.paired.exact else math.nan,
        "paired_p": found.paired.p_value,
        "diff_reason": found.reason,
        "vs_full": found.verdict(higher_is_better=not lower),
        "discriminative": discriminative(found.other, chance, lower),
        **sizes(list(scored.values())),
        "effective_bits": effective_bits(scored, base),
        "chunk": number(first.get("chunk")),
        **fidelity(list(scored.values())),
        "answer_flips": answer_flips(scored, base),
        **by_order(list(scored.values())),
    }


def configuration(record: Record) -> tuple[Any, ...]:
    """What the records of one row have in common: the values of CONFIGURATION, as a row of the points table has them."""
    return *(record[name] for name in IDENTITY), _json(record["point"]), _json(record["stack_config"])


def example_of(record: Record) -> tuple[Any, ...]:
    """What pairs a record with those of other configurations."""
    return record["example_id"], record["prompt_sha256"], record["seed"]


def document_of(record: Record) -> Any:
    """What the record's example shares with others that are not independent of it."""
    return record["group_id"] or record["example_id"]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _as_asked(item: tuple[Any, Record]) -> str:
    return place(str(document_of(item[1])))


def is_scored(record: Record) -> bool:
    """Whether the record has a part in its row's score: answered, whole, and with a number."""
    answered = record["status"] in ("ok", "not_exercised") and not record["truncated"]
    return answered and not math.isnan(number(record["score"]))


def sample_of(records: Sequence[Record], *, adaptive: bool = False) -> Sample:
    """Scores, weights and documents of scored records, in their order."""
    groups = [document_of(record) for record in records]
    scores = np.array([number(record["score"]) for record in records])
    weights = np.array([float(record["weight"]) for record in records])
    return Sample(
        scores, weights, np.array(groups, dtype=object), shares=bool(records[0]["higher_is_better"]), adaptive=adaptive
    )


def _against_full(point: Point, base: dict[Any, Record]) -> Comparison:
    first = point.first
    if point.scored and first["stack"] == BASE:
        score = estimate(sample_of(list(point.scored.values()), adaptive=point.adaptive), first["aggregate"])
        return Comparison(score, score, _NO_SCORE, "this is the full cache")
    found = compare(point, base, "the full cache")
    if point.scored and not base:
        return found._replace(reason=f"no full-cache records in run {first['run_id']} with attn={first['attn']}")
    return found


def compare(point: Point, base: Mapping[Any, Record], name: str) -> Comparison:
    """The point beside the records of a base, by `example_of`, on the point's scored examples.

    The base must be of the same `run`. It is called `name` in the reason given instead of a difference when it
    lacks a score for one of these examples.
    """
    if not point.scored:
        return Comparison(_NO_SCORE, _NO_SCORE, _NO_SCORE, "no scored example")
    how, sample = point.first["aggregate"], sample_of(list(point.scored.values()), adaptive=point.adaptive)
    score = estimate(sample, how)
    shared = [example for example in point.scored if example in base and is_scored(base[example])]
    if len(shared) < len(point.scored):
        lacks = f"{name} was scored on {len(shared)} of these {len(point.scored)} prompts (same hash and seed)"
        return Comparison(score, _NO_SCORE, _NO_SCORE, lacks, shared)
    reference = sample_of([base[example] for example in shared], adaptive=point.adaptive)
    paired = difference(sample, reference, how)
    reason = None if math.isfinite(paired.value) else "a score is not finite"
    nats = difference(sample, reference, "mean") if how == "exp_weighted" else _NO_SCORE
    return Comparison(score, estimate(reference, how), paired, reason, shared, nats)


def spread(prefix: str, what: Estimate, value: str | None = None) -> dict[str, float]:
    """Three columns of an estimate: its value under `value` (else the prefix), and both ends of its interval."""
    return {value or prefix: what.value, f"{prefix}_lo": what.interval.low, f"{prefix}_hi": what.interval.high}


def _counts(point: Point) -> dict[str, Any]:
    latest = point.latest
    status = Counter(record["status"] for record in latest.values())
    whole = [record for record in latest.values() if record["status"] in ("ok", "not_exercised")]
    errors = Counter(bare(record["error"]) for record in latest.values() if record["error"])
    return {
        "n": len(point.scored),
        "n_documents": len({str(document_of(record)) for record in point.scored.values()}),
        "n_prompts": len(latest),
        "n_failed": status["failed"],
        "n_refused": status["refused"],
        "n_not_exercised": status["not_exercised"],
        "n_truncated": sum(bool(record["truncated"]) for record in whole),
        "n_empty": sum(map(is_empty, latest.values())),
        "n_unscored": sum(math.isnan(number(record["score"])) and not record["truncated"] for record in whole),
        "n_superseded": len(point.group) - len(latest),
        "n_without_bytes": sum(map(without_bytes, point.scored.values())),
        "warnings": warnings(list(latest.values()), base=point.first["stack"] == BASE),
        "error": "; ".join(f"{text} ({count}x)" for text, count in errors.most_common(3)) or None,
    }
