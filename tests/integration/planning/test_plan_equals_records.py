"""A plan equals what caches hold: every stack of conf/compress at every point, to the byte or within its bounds."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.families.tiny import build, tiny_config
from harness.kv.attention import NAME
from harness.kv.compat import shape_of
from harness.models.load import ModelSpec
from harness.models.random_model import RandomModel
from harness.notebook import evaluate
from harness.planning.sizes import size
from harness.planning.whole_shape import whole_shape
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids

SEEN, NEW, ITEMSIZE = 211, 9, 4
FREE = {"adakv", "d2o", "entropy"}  # splits that depend on data


@lru_cache
def stacks() -> list[tuple[str, Stack]]:
    """(name, stack) of every member at every point."""
    found = []
    for name in conf_tree.members("compress"):
        points = OmegaConf.to_container(conf_tree.composed("compress", name).points)
        found += [(name, conf_tree.stack(name, *(f"{key}={value}" for key, value in point.items()))) for point in points]
    return found


OTHERS = ("gpt_oss", "llama4_text", "gemma4_text", "jamba", "qwen3_next", "deepseek_v3", "kimi_linear")
"""Learned sinks, chunks, shared layers of several shapes, states, latents, both."""


@lru_cache
def engine_of(family: str) -> Engine:
    if family not in OTHERS:
        return tiny_models.engine(family)
    return Engine(build(tiny_config(family), NAME).eval(), torch.float32)


@pytest.mark.parametrize("family", OTHERS)
def test_the_shape_is_known_without_weights(family: str) -> None:
    assert whole_shape(tiny_config(family), torch.float32) == engine_of(family).shape


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", *OTHERS])
def test_every_stack_holds_what_was_planned(family: str) -> None:
    engine = engine_of(family)
    whole = engine.prefill(ids(SEEN), conf_tree.everything())
    tried = 0
    for name, stack in stacks() if family == "llama" else stacks()[::5]:
        try:
            planned = size(stack, engine.shape, SEEN, ITEMSIZE)
            engine.check(stack)
            for layer in engine.shape.full_layers:  # as before a run
                stack.keys.check(engine.shape.layers[layer].d_key)
                stack.values.check(engine.shape.layers[layer].d_value)
        except UserError:
            continue
        cache = (
            engine.read_chunked(ids(SEEN), [engine.start(stack, SEEN)])[0][0]
            if stack.chunked
            else engine.compress(whole, stack)
        )
        held = cache.bytes()
        assert planned.low <= held.total - held.allocated.get("scratch", 0) <= planned.high, name
        if name not in FREE:
            assert planned.exact, name
            assert {kind: n for kind, n in held.allocated.items() if n and kind != "scratch"} == planned.kinds, name
        grown = engine.feed([cache], [ids(NEW, seed=1)])[0][0].bytes().total
        later = size(stack, engine.shape, SEEN, ITEMSIZE, new=NEW)
        assert later.low <= grown <= later.high, name
        tried += 1
    assert tried > (80 if family == "llama" else 10)


def test_records_of_a_run_are_what_was_planned(tmp_path: Path) -> None:
    run = evaluate(
        model="tiny_llama", stacks=["int8_static", "kivi2", "sink_h2o_int8", "duo"], limit=1, results_dir=str(tmp_path),
        **{"task.lengths": [384]},
    )  # fmt: skip
    shape = shape_of(ModelSpec(name="tiny", source="random", random=RandomModel()).config())
    planned = {(name, str(stack.keep and stack.keep.budget.value)): stack for name, stack in stacks()}
    made = [record for record in run.records if record["status"] == "ok"]
    assert len({record["stack"] for record in made}) == 5
    for record in made:
        stack = planned[record["stack"], str(record["point"].get("keep.budget.value"))]
        found = size(stack, shape, record["tokens_seen"], 2)
        assert (found.low, found.high) == (record["kv_bytes_context"],) * 2, (record["stack"], record["point"])
