"""One row of the points table from the records of one configuration; it knows no file and no data frame.

Pairing rule: a difference to the full cache is only taken within one run, over the same examples with the same prompt
hash and seed, under the same attention function. Otherwise it is empty and a text says why.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.run.point_measures import answer_flips, by_order, effective_bits, fidelity, number, sizes
from harness.run.statistics import UNKNOWN, Estimate, Sample, difference, estimate, verdict

Record = Mapping[str, Any]

BASE = "full"
FLOOR = 0.05  # a full-cache score this close to chance cannot fall far enough to tell stacks apart
IDENTITY = ("run_id", "model", "task", "query_aware", "stack", "positions", "phase", "attn")
CONFIGURATION = (*IDENTITY, "point", "stack_config")
RUN_GROUP = ("run_id", "model", "task", "query_aware", "attn")
_NO_SCORE = Estimate(math.nan, UNKNOWN)


def rows(records: Iterable[Record], split: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of all configurations in the order they first appear, split further by the named record fields."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    bases: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in records:
        extra = tuple(record[name] for name in split)
        groups[(*configuration(record), *extra)].append(record)
        if record["stack"] == BASE:
            bases[(*(record[name] for name in RUN_GROUP), *extra)][example_of(record)] = record
    table = []
    taken: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for key, group in groups.items():
        extra = tuple(group[0][name] for name in split)
        run = tuple(group[0][name] for name in RUN_GROUP)
        row = dict(zip(split, extra, strict=True)) | _row(group, bases.get((*run, *extra), {}))
        same = taken[(*run, row["label"])]  # configurations that would read alike get a number
        own = key[: len(key) - len(split)]
        same += [] if own in same else [own]
        row["label"] += f" #{same.index(own) + 1}" if own != same[0] else ""
        table.append(row)
    return table


def _row(group: list[Record], base: dict[Any, Record]) -> dict[str, Any]:
    latest = {example_of(record): record for record in group}  # a re-run under new code replaces the old answer
    scored = {example: record for example, record in latest.items() if is_scored(record)}
    first = next(reversed(scored.values()), group[-1])  # a record without an answer may not know how it is scored
    score, full, paired, reason = _compare(scored, base, first)
    lower = not first["higher_is_better"]
    return {
        **{name: first[name] for name in ("run_id", "model", "task", "metric", "stack", "query_aware", "positions")},
        **{name: first[name] for name in ("phase", "attn", "storage", "aggregate", "higher_is_better", "chance")},
        "point": _json(first["point"]),
        "stack_config": _json(first["stack_config"]),
        "seeds": ",".join(str(seed) for seed in sorted({record["seed"] for record in latest.values()})),
        **_budget(first),
        **_counts(group, latest, scored),
        **_spread("score", score),
        **_spread("full", full, value="full_score"),
        **_spread("diff", paired, value="diff_to_full"),
        "mcnemar_p": paired.p_value,
        "diff_reason": reason,
        "vs_full": verdict(score, full, paired, higher_is_better=not lower, relative=lower),
        "discriminative": _discriminative(full, first["chance"], lower),
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


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def is_scored(record: Record) -> bool:
    """Whether the record has a part in its row's score: answered, whole, and with a number."""
    answered = record["status"] in ("ok", "not_exercised") and not record["truncated"]
    return answered and not math.isnan(number(record["score"]))


def _sample(records: Sequence[Record]) -> Sample:
    groups = [record["group_id"] or record["example_id"] for record in records]
    scores = np.array([number(record["score"]) for record in records])
    return Sample(scores, np.array([float(record["weight"]) for record in records]), np.array(groups, dtype=object))


def _compare(
    scored: dict[Any, Record], base: dict[Any, Record], first: Record
) -> tuple[Estimate, Estimate, Estimate, str | None]:
    """(score, full score, paired difference, why a difference is missing)."""
    how = first["aggregate"]
    if not scored:
        return _NO_SCORE, _NO_SCORE, _NO_SCORE, "no scored example"
    sample = _sample(list(scored.values()))
    score = estimate(sample, how)
    if first["stack"] == BASE:
        return score, score, _NO_SCORE, "this is the full cache"
    if not base:
        return score, _NO_SCORE, _NO_SCORE, f"no full-cache records in run {first['run_id']} with attn={first['attn']}"
    shared = [example for example in scored if example in base and is_scored(base[example])]
    if len(shared) < len(scored):
        reason = f"the full cache was scored on {len(shared)} of these {len(scored)} prompts (same hash and seed)"
        return score, _NO_SCORE, _NO_SCORE, reason
    reference = _sample([base[example] for example in shared])
    paired = difference(sample, reference, how)
    return score, estimate(reference, how), paired, None if math.isfinite(paired.value) else "a score is not finite"


def _spread(prefix: str, what: Estimate, value: str | None = None) -> dict[str, float]:
    return {value or prefix: what.value, f"{prefix}_lo": what.interval.low, f"{prefix}_hi": what.interval.high}


def _counts(group: list[Record], latest: dict[Any, Record], scored: dict[Any, Record]) -> dict[str, Any]:
    status = Counter(record["status"] for record in latest.values())
    whole = [record for record in latest.values() if record["status"] in ("ok", "not_exercised")]
    errors = Counter(record["error"] for record in latest.values() if record["error"])
    return {
        "n": len(scored),
        "n_prompts": len(latest),
        "n_failed": status["failed"],
        "n_refused": status["refused"],
        "n_not_exercised": status["not_exercised"],
        "n_truncated": sum(bool(record["truncated"]) for record in whole),
        "n_unscored": sum(math.isnan(number(record["score"])) and not record["truncated"] for record in whole),
        "n_superseded": len(group) - len(latest),
        "error": "; ".join(f"{text} ({count}x)" for text, count in errors.most_common(3)) or None,
    }


def _budget(record: Record) -> dict[str, Any]:
    """Typed budget columns and the point's short name; a word such as "full" is a unit without a value."""
    point, keep = record["point"], record["stack_config"].get("keep")
    stored = keep.get("budget") if isinstance(keep, Mapping) else None
    budget = dict(stored) if isinstance(stored, Mapping) else {"value": stored}
    for key, value in point.items():
        if key.endswith(("budget.value", "budget.unit")):
            budget[key.rsplit(".", 1)[1]] = value
    value, unit = budget.get("value"), budget.get("unit")
    if isinstance(value, str):
        value, unit = None, value
    named = [_knob(key, knob, unit) for key, knob in point.items() if not key.endswith("budget.unit")]
    label = " ".join([record["stack"], *named])
    return {"budget_value": number(value), "budget_unit": unit, "label": label}


def _knob(key: str, value: object, unit: object) -> str:
    if key.endswith("budget.value") and isinstance(value, int | float):
        return f"{value:.4g}" if unit == "fraction" else f"{value:g} {unit or ''}".strip()
    return f"{key.rsplit('.', 1)[-1]}={value}"


def _discriminative(full: Estimate, chance: float, lower: bool) -> bool | None:
    """Whether the full cache is far enough from a guess for a loss to show; None where that is not known."""
    if not math.isfinite(full.interval.half_width) or (lower and chance <= 0):
        return None
    if lower:
        return full.interval.high < chance
    return full.interval.low > chance and full.value - chance >= FLOOR
