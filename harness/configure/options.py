"""The top-level keys of a configuration that are plain values, checked; nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.configure.typed import check_types
from harness.engine.batches import parse_bytes
from harness.errors import require

AUTO, PRECISION = "auto", 0.05
VIEWS = (AUTO, "off")
PARTS = ("model", "task", "corpus", "compress", "stacks")
MOST_SEED = 1 << 63  # torch's generators take no more


@dataclass(frozen=True, kw_only=True)
class Options:
    """The top-level keys that are plain values, checked.

    Attributes:
        limit: examples of every seed, None for all.
        auto: whether `limit=auto` asked for examples in rounds, until every arm is resolved.
        precision: half-width of a paired interval that resolves an arm, in (0, 1).
        seeds: what examples are drawn with; several are one run, pooled in its tables.
        memory_limit: bytes of the sequence caches that decode together.
        time_limit: seconds that a record may take, None for any.
        redo: make records again that are there.
        decoded_views: auto keeps decoded copies between steps where memory_limit leaves room; off decodes every step.
        batch_invariant: whether a request's logits are the same bits in any company.
    """

    limit: int | None
    seeds: tuple[int, ...]
    memory_limit: int
    time_limit: float | None
    redo: bool
    progress: bool
    decoded_views: str = "auto"
    batch_invariant: bool = False
    auto: bool = False
    precision: float = PRECISION

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Options:
        """UserError names the key that is wrong."""
        limit, seed, seconds = config["limit"], config["seed"], config.get("time_limit")
        fits = limit in (None, AUTO) or (_whole(limit) and limit > 0)
        require(fits, "limit", limit, "a positive whole number of examples, auto or null")
        precision = config.get("precision", PRECISION)
        number = isinstance(precision, int | float) and not isinstance(precision, bool)
        require(number and 0 < precision < 1, "precision", precision, "a half-width above 0 and below 1, for limit=auto")
        seeds = seed if isinstance(seed, list) else [seed]
        fits = bool(seeds) and all(_whole(one) and abs(one) < MOST_SEED for one in seeds) and len(set(seeds)) == len(seeds)
        require(fits, "seed", seed, "a whole number below 2^63, or a list of different ones")
        results, progress = config["results_dir"], config["progress"]
        require(isinstance(results, str) and bool(results.strip()), "results_dir", results, "a folder")
        require(isinstance(progress, bool), "progress", progress, "true or false")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        fits = seconds is None or (number and 0 < seconds < math.inf)
        require(fits, "time_limit", seconds, "a positive number of seconds or null")
        redo = config.get("redo", False)
        require(isinstance(redo, bool), "redo", redo, "true or false")
        views, invariant = config.get("decoded_views", "auto"), config.get("batch_invariant", False)
        views = "off" if views is False else views  # what YAML makes of a bare off
        require(views in VIEWS, "decoded_views", views, f"allowed are {', '.join(VIEWS)}")
        require(isinstance(invariant, bool), "batch_invariant", invariant, "true or false")
        for key, value in config.items():
            if key not in PARTS:
                check_types(value, key)  # a number that no file of a run can hold
        return cls(
            limit=None if limit == AUTO else limit,
            auto=limit == AUTO,
            precision=float(precision),
            seeds=tuple(seeds),
            memory_limit=parse_bytes("memory_limit", config["memory_limit"]),
            time_limit=None if seconds is None else float(seconds),
            redo=redo,
            progress=progress,
            decoded_views=views,
            batch_invariant=invariant,
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
