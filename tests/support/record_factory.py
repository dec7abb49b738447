"""Synthetic records in the shape a run writes; deterministic, no model. For tests of everything after the records."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.types import BYTE_KINDS, Record

ROW = 30 * 3 * 2 * 64 * 2  # layers x KV heads x (K, V) x head dim x bytes of bf16: one token of the full cache
FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
# stack -> (quality at a tiny budget, query-aware gain, bits per value, fractions); quality rises to 1 with the budget
STACKS: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "full": (1.0, 0.0, 16.0, ()),
    "int8": (1.0, 0.0, 8.25, ()),
    "int4": (0.96, 0.0, 4.6, ()),
    "streaming": (0.02, 0.0, 16.0, FRACTIONS),
    "window": (0.0, 0.0, 16.0, FRACTIONS),
    "h2o": (0.1, 0.2, 16.0, FRACTIONS),
    "sink_h2o_int8": (0.12, 0.2, 8.25, FRACTIONS),
    "snapkv": (0.15, 0.75, 16.0, FRACTIONS),
    "snapkv_int4": (0.13, 0.75, 4.6, FRACTIONS),
    "tova": (0.1, 0.8, 16.0, FRACTIONS),
    "knorm": (0.05, 0.0, 16.0, FRACTIONS),
    "random": (0.0, 0.0, 16.0, FRACTIONS),
}


def sha(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def make(**changes: Any) -> dict[str, Any]:
    """One record as a dict; unnamed fields are those of a full-cache answer that was right."""
    base: dict[str, Any] = dict(
        key="", run_id="smollm2-needle-0a1b2c3d", example_id="1024-0.5-0", group_id="genesis", prompt_sha256="",
        first_ids=[1, 2, 3, 4], n_prompt=1000, truncated=False, length=1024, depth=0.5, model="smollm2", task="needle",
        stack="full", stack_config={"keep": None, "codec": {"keys": "exact", "values": "exact"}, "kv_dtype": "bfloat16"},
        point={}, phase="prefill", query_aware=False, positions="original", attn="harness", storage="packed", kv_dtype="bfloat16",
        gold=["4271893"], metric="contains", seed=0, tokens_seen=1000, tokens_kept=1000.0, output="4271893", score=1.0,
        metrics={"strict": 1.0}, stop_reason="eos",
    )  # fmt: skip
    base |= changes
    base["prompt_sha256"] = base["prompt_sha256"] or sha(base["task"], base["example_id"], base["seed"])
    identity = ("run_id", "example_id", "prompt_sha256", "stack", "point", "stack_config", "seed")
    base["key"] = base["key"] or sha(*(base[name] for name in identity))
    full = ROW * base["n_prompt"]
    sizes = {"kv_bytes_context": full, "kv_bytes_final": full + 12 * ROW, "kv_bytes_peak": full + 12 * ROW}
    sizes |= {"kv_bytes_peak_prefill": full, "kv_bytes_full": full, "kv_bytes_full_final": full + 12 * ROW}
    for name, value in sizes.items():
        base.setdefault(name, value)
    base.setdefault("bytes", split({"payload": base["kv_bytes_context"] or 0}))
    return dataclasses.asdict(Record(**base))


def split(allocated: dict[str, int]) -> dict[str, dict[str, int]]:
    whole = {kind: int(allocated.get(kind, 0)) for kind in BYTE_KINDS}
    return {"allocated": whole, "logical": whole | {"padding": 0}}


def grid(lengths: Iterable[int] = (1024, 4096), depths: int = 5, repeats: int = 4) -> Iterator[dict[str, Any]]:
    """Example fields of a needle grid: lengths x depths x repeats, 40 by default."""
    for length in lengths:
        for depth in np.linspace(0, 1, depths).round(2).tolist():
            for repeat in range(repeats):
                name = f"{length}-{depth}-{repeat}"
                yield {"example_id": name, "length": length, "depth": depth, "n_prompt": length - 40, "group_id": name}


def answer(
    example: dict[str, Any], stack: str, fraction: float | None, *, query_aware: bool = False, **more: Any
) -> dict[str, Any]:
    """What a stack at a budget would write for an example: chance of being right from the tables above."""
    low, gain, bits, _ = STACKS[stack]
    share = 1.0 if fraction is None else fraction
    right = min(1.0, (low + gain * query_aware) * (1 - share) + share**0.7) if share < 1 else low
    draw = np.random.default_rng(int(sha(stack, fraction, example["example_id"], query_aware)[:8], 16)).random()
    kept = max(int(example["n_prompt"] * share), 8)
    payload = int(kept * ROW * min(bits, int(bits)) / 16)
    parts = {
        "payload": payload,
        "metadata": int(kept * ROW * (bits - int(bits)) / 16),
        "padding": 0 if share == 1 else 4096,
    }
    parts["tail"] = 32 * ROW if "int4" in stack else 0
    parts["positions"] = 0 if share == 1 else kept * 30 * 3 * 4
    parts["state"] = kept * 30 * 3 * 4 if "h2o" in stack else 0
    total, full = sum(parts.values()), ROW * example["n_prompt"]
    budget = None if fraction is None else {"unit": "fraction", "value": fraction}
    config = {
        "keep": budget and {"_target_": "harness.stages.keep.Keep", "sinks": 4, "recent": None, "scorer": stack.split("_int")[0], "budget": budget},
        "codec": {"keys": f"int{int(bits)}" if bits < 16 else "exact", "values": f"int{int(bits)}" if bits < 16 else "exact", "group": 32},
        "kv_dtype": "bfloat16",
    }  # fmt: skip
    record = make(
        **example, stack=stack, stack_config=config, point={} if fraction is None else {"keep.budget.value": fraction},
        phase="always" if "h2o" in stack else "prefill", query_aware=query_aware, score=float(draw < right),
        run_id=f"smollm2-needle-{'a' if query_aware else '0'}a1b2c3d", tokens_seen=example["n_prompt"],
        tokens_kept=float(kept), entries_touched=0 if stack == "full" else 1, bytes=split(parts),
        kv_bytes_context=total, kv_bytes_final=total + 12 * ROW, kv_bytes_peak=total + 12 * ROW,
        kv_bytes_peak_prefill=max(total, full), **more,
    )  # fmt: skip
    return record


def sweep(*, query_aware: bool = False, stacks: Iterable[str] = tuple(STACKS), **shape: Any) -> list[dict[str, Any]]:
    """A whole run: every stack at every budget on every example of the grid."""
    return [
        answer(example, stack, fraction, query_aware=query_aware)
        for example in grid(**shape)
        for stack in stacks
        for fraction in STACKS[stack][3] or (None,)
    ]


def perplexity(stack: str, nll: Iterable[float], **more: Any) -> list[dict[str, Any]]:
    """Records of a perplexity run: mean NLL per token as score, tokens as weight, lower is better."""
    return [
        make(
            run_id="smollm2-perplexity-77777777",
            task="perplexity",
            metric="perplexity",
            stack=stack,
            example_id=f"doc{i}",
            group_id=f"doc{i}",
            length=None,
            depth=None,
            score=float(value),
            weight=100.0 + 10 * i,
            aggregate="exp_weighted",
            higher_is_better=False,
            chance=49152.0,
            **more,
        )
        for i, value in enumerate(nll)
    ]


def write_shard(run_dir: Path, records: Iterable[dict[str, Any]], writer: str = "main") -> Path:
    """One shard as a run leaves it: strict JSON, one record a line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    shard = run_dir / f"records-{writer}.jsonl"
    shard.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")
    return shard
