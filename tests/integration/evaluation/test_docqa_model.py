"""Country reports asked of the default model by the command: the answer comes from the cache, and a starved cache loses it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hydra.utils import instantiate

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.models.load import load
from harness.stages.codec.int_groups import IntGroups
from harness.stages.stack import Stack
from tests.integration.models.test_model_load import configured
from tests.support import conf_tree
from tests.support.started import started

ROOT = Path(__file__).resolve().parents[3]
N, LENGTH, NEW = 6, 384, 10


def records(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """What `python -m harness task=docqa` wrote."""
    settings = ["task=docqa", f"task.lengths=[{LENGTH}]", f"task.max_new_tokens={NEW}", f"task.per_length={N}"]
    done = started("harness", [*settings, *overrides, "progress=false", f"results_dir={folder}"], ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    run = ROOT / done.stdout.strip().splitlines()[-1]
    return [json.loads(line) for file in sorted(run.glob("records-*.jsonl")) for line in file.read_text().splitlines()]


def score(found: list[dict[str, Any]], stack: str) -> float:
    return fmean(record["score"] for record in found if record["stack"] == stack)


@pytest.mark.slow
def test_the_score_reads_the_record_in_the_cache(tmp_path: Path) -> None:
    swapped = "task.swap=true"
    found = records(tmp_path, swapped, "compress=window", "compress.points=[{keep.budget.value: 0.05}]")
    full = [record for record in found if record["stack"] == "full"]
    assert len(full) == N and len(found) == 2 * N and {record["status"] for record in found} == {"ok"}
    assert 0.2 < score(full, "full") < 1.0
    assert score([r for r in found if r not in full], found[-1]["stack"]) < score(full, "full")
    for record in full:
        assert record["n_prompt"] + NEW <= LENGTH and record["chance"] == 0.0 and 0 <= record["depth"] <= 1
    assert len({record["group_id"] for record in full}) == N
    alone = records(tmp_path, swapped, "compress=full", "task.baseline=no_context")
    assert [r["gold"] for r in alone] == [r["gold"] for r in full] and {r["task"] for r in alone} == {"docqa_no_context"}
    assert score(alone, "full") <= 0.1


@pytest.mark.slow
def test_extreme_compression_changes_the_answer_likelihoods_of_every_report() -> None:
    """Four rows, or two bits: the gold answer's tokens are scored by what the compressed cache holds, as many in every arm."""
    lm = load(configured("smollm2"), NAME)
    engine = Engine(lm.model, lm.kv_dtype)
    settings = conf_tree.config("task", "docqa", f"lengths=[{LENGTH}]", "per_length=3")
    two = IntGroups(name="int2", bits=2, residual=0)
    stacks = [Stack(), Stack(keep=conf_tree.keep("window", 4)), Stack(keys=two, values=two)]
    for example in instantiate(settings, _convert_="all").examples(lm.tokens, None, 0):
        prompt = lm.tokens.prompt(example.context, example.question, example.answer_prefix, chat=False)
        context, held = prompt.split(query_aware=False)
        target = lm.tokens.encode(" " + example.answers[0])
        prefix = engine.prefill(context)
        full, *small = engine.score([engine.compress(prefix, stack) for stack in stacks], [held] * 3, [target] * 3)
        for one in small:
            assert len(one.logp) == len(full.logp) == len(target)
            assert max(abs(a - b) for a, b in zip(one.logp, full.logp, strict=True)) > 1e-3
