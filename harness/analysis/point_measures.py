"""What the records of one row measured: bytes, bits a value, fidelity to the full cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.analysis.intervals import FEW_DOCUMENTS, Estimate
from harness.types import BYTE_KINDS

Record = Mapping[str, Any]

FIDELITY = ("kl_to_full", "top1_agreement", "attention_error", "nll_per_byte")
FLOOR = 0.05  # a full-cache score this close to chance cannot fall far enough to tell stacks apart
KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


def number(value: object) -> float:
    """A stored number; missing is NaN, and infinities written as words stay infinite."""
    return math.nan if value is None else float(value)  # type: ignore[arg-type]


def chance_of(records: Sequence[Record], aggregate: str) -> float:
    """Score of a guess on all of these examples, aggregated as scores are: they may differ in how many choices they have.

    NaN where a record does not know it.
    """
    chances, weights = (np.array([number(r[name]) for r in records]) for name in ("chance", "weight"))
    if (chances == chances[0]).all():
        return float(chances[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        if aggregate == "exp_weighted":
            return float(np.exp(np.sum(np.log(chances) * weights) / np.sum(weights)))
        return float(np.sum(chances * weights) / np.sum(weights))


def without_bytes(record: Record) -> bool:
    """Whether a record's context bytes, or the full cache's, are missing or not above zero: no place on a byte axis."""
    return not all(number(record[name]) > 0 for name in ("kv_bytes_context", "kv_bytes_full"))


def answer_flips(scored: Mapping[Any, Record], base: Mapping[Any, Record]) -> float:
    """Share of examples whose answer is not the full cache's, right or wrong; NaN where answers or the base are missing."""
    pairs = [(record["output"], base[example]["output"]) for example, record in scored.items() if example in base]
    known = [one != other for one, other in pairs if one is not None and other is not None]
    return sum(known) / len(known) if known else math.nan


def by_order(records: Sequence[Record]) -> dict[str, float]:
    """Mean score of the first questions on a context and of all later ones; NaN where contexts have one question only."""
    scores: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        if record.get("order") is not None:
            scores[record["order"] == 1].append(number(record["score"]))
    return {"score_first": mean(scores[True]), "score_later": mean(scores[False])}


def fidelity(records: Sequence[Record]) -> dict[str, float]:
    """Means of the metrics FIDELITY, weighted as the scores are (streams: by tokens); NaN where no record has one."""
    return {name: _weighted(records, name) for name in FIDELITY}


def _weighted(records: Sequence[Record], metric: str) -> float:
    """Mean of a metric over the records that have it, weighted as their scores are (streams: by tokens)."""
    pairs = [(number(record["metrics"].get(metric)), float(record["weight"])) for record in records]
    known = [(value, weight) for value, weight in pairs if not math.isnan(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else math.nan


def sizes(records: Sequence[Record]) -> dict[str, float]:
    """Byte columns and token counts: means, peaks as maxima, ratios as sums over sums."""

    def column(name: str) -> np.ndarray[Any, Any]:
        return np.array([number(record[name]) for record in records])

    context, full = column("kv_bytes_context"), column("kv_bytes_full")
    final, full_final = column("kv_bytes_final"), column("kv_bytes_full_final")
    most = full_final if any(record.get("chunk") for record in records) else full  # a time mean has no peak to compare
    parts = {
        f"{sort}_{kind}": mean([number(record["bytes"].get(sort, {}).get(kind)) for record in records])
        for sort in ("allocated", "logical")
        for kind in BYTE_KINDS
    }
    return {
        "bytes_context": mean(context),
        "bytes_full": mean(full),
        "ratio": ratio(context, full),
        "bytes_final": mean(final),
        "bytes_full_final": mean(full_final),
        "ratio_final": ratio(final, full_final),
        "bytes_peak": _max(column("kv_bytes_peak")),
        "bytes_peak_prefill": _max(column("kv_bytes_peak_prefill")),
        "peak_exceeds_full": bool((column("kv_bytes_peak_prefill") > most).any()),
        **parts,
        "bytes_logical": float(np.sum([parts[f"logical_{kind}"] for kind in BYTE_KINDS])),
        "reach": mean([number(record.get("reach")) for record in records]),
        "tokens_seen": mean(column("tokens_seen")),
        "tokens_kept": mean(column("tokens_kept")),
    }


def mean(values: Any) -> float:
    """Mean of the known values; NaN where nothing is."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else math.nan


def _max(values: np.ndarray[Any, Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else math.nan


def ratio(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> float:
    """Sum over sum where both are known; NaN where nothing is."""
    both = ~(np.isnan(part) | np.isnan(whole))
    return float(part[both].sum() / whole[both].sum()) if whole[both].sum() > 0 else math.nan


def effective_bits(scored: Mapping[Any, Record], base: Mapping[Any, Record]) -> float:
    """Allocated bits per K or V value that is still held: bytes against those of a full cache of the kept tokens.

    Both at the moment of `tokens_kept`, which is the end of a stream. NaN where the records do not say `kv_dtype`, where
    the base is missing, or where nothing is held.
    """
    held = wanted = 0.0
    for example, record in scored.items():
        dtype = record.get("kv_dtype") or record["stack_config"].get("kv_dtype")
        bits, full = KV_BITS.get(str(dtype).removeprefix("torch.")), base.get(example)
        moment = "kv_bytes_final" if record.get("chunk") else "kv_bytes_context"
        if bits is None or full is None or not full["tokens_kept"] or record[moment] is None:
            return math.nan
        states = number(record["bytes"].get("allocated", {}).get("recurrent", 0))  # hold no K or V value; the same in every arm
        held += record[moment] - states
        wanted += (number(full[moment]) - states) * record["tokens_kept"] / full["tokens_kept"] / bits
    return held / wanted if wanted else math.nan


def discriminative(full: Estimate, chance: float, lower: bool) -> bool | None:
    """Whether the full cache is far enough from a guess for a loss to show; None where that is not known."""
    if not (math.isfinite(full.interval.half_width) and math.isfinite(chance)) or (lower and chance <= 0):
        return None
    seems = full.value < chance if lower else full.value - chance >= FLOOR
    clear = full.interval.high < chance if lower else full.interval.low > chance
    few = full.documents is not None and full.documents < FEW_DOCUMENTS
    return None if few and seems and not clear else seems and clear
