"""The fields of a record that a runner fills in; which ones there are depends on the task, and on how a request ended."""

from __future__ import annotations

from typing import TypedDict

from harness.files.json_values import Json


class Fields(TypedDict, total=False):
    """Some fields of `types.Record`, with their types there."""

    prompt_sha256: str
    length: int | None
    task: str
    storage: str
    metric: str
    higher_is_better: bool
    aggregate: str
    weight: float
    chance: float
    tokens_seen: int
    tokens_kept: float
    entries_touched: int
    compressed_share: float | None
    codec_info: Json
    layer_budget: str | None
    output: str | None
    score: float | None
    metrics: dict[str, float]
    missing: dict[str, str]
    decoding: str
    stop_reason: str | None
    kv_bytes_context: int | None
    kv_bytes_final: int | None
    kv_bytes_peak: int | None
    kv_bytes_peak_prefill: int | None
    kv_bytes_full: int | None
    kv_bytes_full_final: int | None
    bytes: Json
    timings: dict[str, float]
    series_path: str | None
    chunk: int | None
    rope_length: int | None
    status: str
    error: str | None
