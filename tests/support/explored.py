"""A page with all that there is to explore: two tasks, two modes, a stream, mixed bits, changed answers, hostile names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.findings import findings
from harness.pages import dashboard
from tests.support import hostile_names as hostile
from tests.support.record_factory import ROW, grid, make, sha, split, sweep
from tests.support.stream_factory import stream

EVICTING = ("full", "int8", "streaming", "h2o", "snapkv_int4")
EXACT = {"_target_": "harness.stages.codec.exact.Exact"}
ASKED = "Which number? " + hostile.CLOSES
ANSWER = "It is 12. " + hostile.RUNS
MANIFEST = {
    "command": ["model=smollm2", "task=needle", "limit=20", "stacks=[int8,h2o]", "redo=true", "compress.keep.sinks=8"],
    "spellings": {"h2o keep.budget.value=0.1": ["h2o compress.keep.sinks=8 keep.budget.value=0.1"]},
}


def codec(bits: int) -> dict[str, Any]:
    return EXACT if bits == 16 else {"_target_": "harness.stages.codec.int_groups.IntGroups", "bits": bits, "group": 32}


def write(path: Path) -> Path:
    """The page, from records of two runs of needle (one query-aware), one of docqa and one of a stream."""
    records = [
        record for task, aware in (("needle", False), ("needle", True), ("docqa", False)) for record in _run(task, aware)
    ]
    streamed = [record | {"model": "tiny"} for record in stream(path.parent, ["full", "int8", "h2o"], (0.1, 0.5))]
    dashboard.write(findings(records + streamed, path.parent), path, {"smollm2-needle-0": MANIFEST})
    return path


def _run(task: str, aware: bool) -> list[dict[str, Any]]:
    same: dict[str, Any] = {"task": task, "run_id": f"smollm2-{task}-{int(aware)}", "query_aware": aware, "question": ASKED}
    swept = sweep(query_aware=aware, stacks=EVICTING, repeats=2)
    made = [record | same | _answered(record, record["stack"]) | {"prompt_sha256": record["example_id"]} for record in swept]
    for example in grid(repeats=2):
        example["prompt_sha256"] = example["example_id"]
        for keys, values in ((8, 4), (4, 8), (4, 2), (2, 4)):
            made.append(_mixed(example, keys, values, same))
        score = float(example["depth"] > 0.3)
        made.append(make(**example, **same, stack=hostile.RUNS, score=score, output=ANSWER, kv_bytes_context=ROW * 200))
    return made


def _answered(record: dict[str, Any], stack: str) -> dict[str, Any]:
    bits = 4 if "int4" in stack else 8 if "int8" in stack else 16
    keep = record["stack_config"]["keep"]
    config = {"keys": codec(bits), "values": codec(bits), "keep": keep, "positions": "original"}
    return {"stack_config": config, "output": record["output"] if record["score"] else ANSWER}


def _mixed(example: dict[str, Any], keys: int, values: int, same: dict[str, Any]) -> dict[str, Any]:
    name, size = f"k{keys}v{values}", int(ROW * example["n_prompt"] * (keys + values + 1) / 32)
    right = np.random.default_rng(int(sha(name, example["example_id"])[:8], 16)).random() < 0.3 + 0.06 * keys
    config = {"keys": codec(keys), "values": codec(values), "keep": None, "positions": "original"}
    more: dict[str, Any] = {"score": float(right), "output": "4271893" if right else ANSWER, "kv_bytes_context": size}
    return make(**example, **same, **more, stack=name, stack_config=config, bytes=split({"payload": size}), entries_touched=1)
