"""Streams read through the compressed cache: exact where nothing is compressed, whatever the chunks, and never blind to it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from harness.engine.engine import Engine
from harness.engine.streams import Read, Reading, read
from harness.kv.compat import forward
from harness.stages.budget import Amount
from harness.stages.codec.int_groups import IntGroups
from harness.stages.keep import Keep
from harness.stages.score.h2o import H2O
from harness.stages.score.recency import Recency
from harness.stages.stack import Stack
from tests.integration.commands.test_command import harness, records
from tests.support import tiny_models

FOUR = Keep(scorer=Recency(), budget=Amount(unit="tokens", value=4))
HEAVY = Keep(scorer=H2O(), budget=Amount(unit="tokens", value=24), sinks=4)
TWO_BITS = IntGroups(name="int2", bits=2, residual=0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_models.engine("llama")


def run(engine: Engine, documents: list[list[int]], stacks: list[Stack], chunk: int) -> list[Read]:
    """Every document under every stack, all in one wave; the first stack of each is the reference."""
    readings = [
        Reading(ids=tuple(ids), row=engine.start(stack, len(ids), 0), reference=d * len(stacks))
        for d, ids in enumerate(documents)
        for stack in stacks
    ]
    return read(engine, readings, chunk)


def one_shot(engine: Engine, ids: list[int]) -> np.ndarray:
    """Negative log-likelihoods of ids[1:] from one stock forward over the whole text."""
    from transformers import DynamicCache

    model = engine.model
    attn = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        logits = forward(model, torch.tensor([ids[:-1]]), torch.arange(len(ids) - 1)[None], cache, slice(None))[0]
    model.set_attn_implementation(attn)
    return -logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("chunk", [1, 32, 1000])
def test_the_full_cache_gives_the_one_shot_likelihoods_whatever_the_chunk(engine: Engine, chunk: int) -> None:
    ids = tiny_models.ids(120)
    (full,) = run(engine, [ids], [Stack()], chunk)
    np.testing.assert_allclose(full.curve("nll"), one_shot(engine, ids), atol=1e-4)
    assert full.curve("kl").max() == 0 and full.curve("agree").min() == 1


def test_documents_together_and_one_at_a_time_agree(engine: Engine) -> None:
    documents = [tiny_models.ids(n, seed=n) for n in (50, 120, 200)]
    stacks = [Stack(), Stack(keep=HEAVY, phase="always")]
    together = run(engine, documents, stacks, 32)
    alone = [one for ids in documents for one in run(engine, [ids], stacks, 32)]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.curve("nll"), b.curve("nll"), atol=1e-4)
        assert a.row.held() == b.row.held() and a.mean_bytes == b.mean_bytes


@pytest.mark.parametrize(
    "stack", [Stack(keep=FOUR, phase="always"), Stack(keys=TWO_BITS, values=TWO_BITS)], ids=["4 rows", "2 bit"]
)
def test_extreme_compression_changes_likelihoods_of_every_document(engine: Engine, stack: Stack) -> None:
    documents = [tiny_models.ids(n, seed=n) for n in (100, 150)]
    results = run(engine, documents, [Stack(), stack], 32)
    for full, small in zip(results[::2], results[1::2], strict=True):
        assert len(full.curve("nll")) == len(small.curve("nll"))
        assert np.abs(full.curve("nll") - small.curve("nll")).max() > 1e-3
        assert small.curve("kl").mean() > 0
        assert small.mean_bytes < full.mean_bytes
        assert bool((small.errors[1:, 0] > 0).all())


def test_memory_of_an_evicting_stream_is_flat_and_bounded(engine: Engine) -> None:
    ids = tiny_models.ids(400)
    (reading,) = [Reading(ids=tuple(ids), row=engine.start(Stack(keep=HEAVY, phase="always"), 400, 0), reference=0)]
    (out,) = read(engine, [reading], 16)
    assert {n for layer in out.row.held() for n in layer} == {24}
    short = read(engine, [Reading(ids=tuple(ids[:100]), row=reading.row, reference=0)], 16)[0]
    assert out.peak == short.peak


def test_a_stream_run_writes_curves_and_refuses_what_chooses_once(tmp_path: Path) -> None:
    out = harness(
        "model=tiny_llama",
        "corpus=stdlib",
        "progress=false",
        "task=stream",
        "task.tokens=200",
        "task.documents=2",
        "stacks=[int8,streaming,snapkv]",
        cwd=tmp_path,
    )
    assert out.returncode == 0, out.stderr
    folder = tmp_path / out.stdout.strip().splitlines()[-1]
    found = records(folder)
    assert {r["status"] for r in found if r["stack"] == "snapkv"} == {"refused"}
    scored = [r for r in found if r["status"] == "ok"]
    assert {r["weight"] for r in scored} == {scored[0]["weight"]}, "as many scored tokens in every arm"
    for record in scored:
        series = pd.read_parquet(folder / record["series_path"])
        assert math.isclose(series.nll.mean(), record["score"], rel_tol=1e-5)
        assert record["aggregate"] == "exp_weighted" and not record["higher_is_better"] and record["chunk"] == 32
    front = json.loads((folder / "frontier.json").read_text())
    assert "time mean" in front["x"]["meaning"]
