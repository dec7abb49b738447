"""A trained model, measured by the harness as anybody would: recall through `task=jsonl`, prose through `task=stream`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import harness

PIECES, PIECE = 32, 65  # held-out pieces of prose and their bytes, the BOS included


@dataclass(frozen=True)
class Measured:
    """One trained model.

    Attributes:
        design, seed, parameters: which one.
        n: questions asked.
        recall, recall_lo, recall_hi: share of them answered right, with its 95 % Wilson interval.
        kv_bytes, tokens: of the cache after the context, and how many tokens that was.
        bits, bits_lo, bits_hi: of a byte of held-out prose, with the 95 % interval over its pieces.
    """

    design: str
    seed: int
    parameters: int
    n: int
    recall: float
    recall_lo: float
    recall_hi: float
    kv_bytes: int
    tokens: int
    bits: float
    bits_lo: float
    bits_hi: float


@dataclass(frozen=True)
class Desk:
    """Files of questions and of held-out prose, and the folder of the runs."""

    questions: Path
    prose: Path
    runs: Path


def measured(model: Path, desk: Desk, *, design: str, seed: int, parameters: int) -> Measured:
    """Run both tasks under the full cache of the design; what is in the run folders already is not made again."""
    known = {"model": model, "model__tokenizer": "bytes", "stacks": ["full"], "results_dir": str(desk.runs), "progress": False}
    asked = {
        "task": "jsonl",
        "task__path": str(desk.questions),
        "task__max_new_tokens": 1,
        "task__metric": "exact",
        "task__chance": 0.1,
    }
    recall = harness.evaluate(**known, **asked)
    read = {"task": "stream", "task__tokens": PIECE, "task__documents": PIECES, "task__chunk": PIECE}
    language = harness.evaluate(**known, **read, corpus="path", corpus__path=str(desk.prose))
    one, text = _only(recall.points), _only(language.points)
    first = recall.records[0]
    return Measured(
        design=design,
        seed=seed,
        parameters=parameters,
        n=int(one["n"]),
        recall=float(one["score"]),
        recall_lo=float(one["score_lo"]),
        recall_hi=float(one["score_hi"]),
        kv_bytes=int(first["kv_bytes_context"]),
        tokens=int(first["tokens_seen"]),
        bits=math.log2(text["score"]),
        bits_lo=math.log2(text["score_lo"]),
        bits_hi=math.log2(text["score_hi"]),
    )


def _only(points: pd.DataFrame) -> pd.Series:  # type: ignore[type-arg]
    (row,) = (row for _, row in points.iterrows())
    return row
