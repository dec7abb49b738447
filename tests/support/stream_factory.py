"""Synthetic stream runs: records and the series files beside them, as a run leaves both; deterministic, no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.findings import findings
from harness.pages import dashboard
from tests.support.record_factory import ROW, make, sha

RUN = "smollm2-stream-5e5e5e5e"


def document(stack: str, budget: float | None, index: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(nll, kl) of a document, each (tokens - 1,): every stack reads the same text, small budgets read it worse."""
    text = np.random.default_rng(index).gamma(2.0, 1.4, tokens - 1)
    loss = 0.0 if stack == "full" else 0.02 + 0.1 * (1 - (budget or 1.0))
    late = np.linspace(0, 1, tokens - 1)
    return (text + loss * late).astype(np.float32), np.full(tokens - 1, loss, np.float32)


def stream(
    folder: Path, stacks: Iterable[str], budgets: Iterable[float], *, documents: int = 3, tokens: int = 512, **more: Any
) -> list[dict[str, Any]]:
    """Records of a stream run whose series lie in folder/series; `full` and `int...` stacks have no budget."""
    (folder / "series").mkdir(parents=True, exist_ok=True)
    records = []
    for stack in stacks:
        for budget in [None] if stack == "full" or stack.startswith("int") else list(budgets):
            for index in range(documents):
                nll, kl = document(stack, budget, index, tokens)
                path = Path("series") / f"{sha(more, stack, budget, index)[:16]}.parquet"
                pd.DataFrame({"position": np.arange(1, tokens, dtype=np.int32), "nll": nll, "kl": kl}).to_parquet(folder / path)
                records.append(_record(stack, budget, index, tokens, nll, kl, path, more))
    return records


def _record(
    stack: str, budget: float | None, index: int, tokens: int, nll: np.ndarray, kl: np.ndarray, path: Path, more: dict[str, Any]
) -> dict[str, Any]:
    kept, share = tokens * (budget or 1.0), 0.5 if stack.startswith("int") else 1.0
    keep = budget and {"sinks": 4, "scorer": stack, "budget": {"unit": "fraction", "value": budget}}
    fields: dict[str, Any] = dict(
        run_id=RUN, task="stream", metric="perplexity", stack=stack, example_id=f"doc{index}", group_id=f"doc{index}",
        length=tokens, depth=None, n_prompt=tokens, score=float(nll.mean()), weight=float(len(nll)), chunk=32,
        aggregate="exp_weighted", higher_is_better=False, chance=49152.0, series_path=str(path), phase="always",
        stack_config={"keep": keep, "kv_dtype": "bfloat16"}, point={} if budget is None else {"keep.budget.value": budget},
        tokens_seen=tokens, tokens_kept=kept, output=None, kv_bytes_context=int(ROW * kept * share * 0.6),
        kv_bytes_full=int(ROW * tokens * 0.5), kv_bytes_final=int(ROW * kept * share), kv_bytes_full_final=ROW * tokens,
        kv_bytes_peak=int(ROW * kept * share), kv_bytes_peak_prefill=int(ROW * kept * share),
        metrics={"kl_to_full": float(kl.mean()), "top1_agreement": 1 - float(kl.mean()), "attention_error": 0.1, "nll_per_byte": 0.75},
    )  # fmt: skip
    return make(**fields | more)


def write_streams(folder: Path, records: list[dict[str, Any]]) -> Path:
    """The page of a stream run, with its curves."""
    path = folder / "dashboard.html"
    dashboard.write(findings(records, folder), path)
    return path
