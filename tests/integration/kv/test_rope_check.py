"""Rotation, family by family: keys are turned back only where that gives the same keys wherever a text starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.stages.stack import Stack
from tests.integration.kv.test_families import SUPPORTED, config
from tests.integration.kv.test_positions import in_both_modes
from tests.support import conf_tree
from tests.support.recording import recording
from tests.support.tiny_models import SHAPE, build, ids

PLAIN = ("global layers without rotation, cohere2", "global layers without rotation, exaone4")
SOME = (*PLAIN, "some layers without rotation, smollm3")
NONE = ("one KV head, gpt_bigcode",)
ODD: dict[str, Callable[[], PretrainedConfig]] = {
    "a norm after the rotation, hunyuan": lambda: config("HunYuanDenseV1Config", head_dim=32),
    "one tensor at a time, gptj": lambda: transformers.GPTJConfig(
        vocab_size=128, n_embd=128, n_layer=3, n_head=4, n_positions=256, rotary_dim=16, initializer_range=0.05
    ),
}


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in (*SOME, *NONE)])
def test_both_modes_of_positions_agree_without_eviction(name: str) -> None:
    engine = Engine(build(SUPPORTED[name](), "kv_harness"), torch.float32)
    assert None not in engine.ropes and not engine.rope_moves
    torch.testing.assert_close(*in_both_modes(engine), atol=3e-5, rtol=3e-5)
    with recording(tuple(range(len(engine.shape.layers)))) as recorded:
        engine.prefill(ids(50))
    for layer, rope in enumerate(engine.ropes):
        ((_, k),) = recorded[layer]
        at = torch.arange(50)
        assert rope is not None
        torch.testing.assert_close(rope.rotate(rope.unrotate(k, at), at), k, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*SOME, *NONE, *ODD])
def test_layers_without_a_rotation_to_undo_keep_their_positions(name: str) -> None:
    engine = Engine(build((SUPPORTED | ODD)[name](), "kv_harness"), torch.float32)
    assert [i for i, rope in enumerate(engine.ropes) if rope is None] == (
        [3] if name in PLAIN else [2] if name in SOME else [0, 1, 2]
    )
    assert engine.rope_moves == (name in ODD)
    with pytest.raises(UserError, match=r"compress\.positions='cache' is not possible"):
        engine.start(Stack(keep=conf_tree.keep("streaming", 8), positions="cache"), 20)
    moments = Stack(keep=conf_tree.keep("expected_attention", 20))
    if name in ODD:
        with pytest.raises(UserError, match="predicts queries"):
            engine.check(moments)
    else:
        engine.compress(engine.prefill(ids(60), moments.needs), moments)


def test_what_attention_would_not_honour_is_one_line_even_where_the_configuration_says_nothing() -> None:
    model = build(transformers.LlamaConfig(**SHAPE), "kv_harness")
    engine = Engine(model, torch.float32)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UserError, match="not causal"):
        engine.prefill(ids(9))
