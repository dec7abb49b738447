"""Values that are turned where they are stored are those of QuaRot's model, whose projections turn them: same codes, same answers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.hadamard import Hadamard, matrix
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import build, config, ids

CONTEXT = 90


def fused(model: PreTrainedModel) -> PreTrainedModel:
    """The model with H / sqrt(d) in W_v, biases included, and once more in W_o, head by head: the same function."""
    turned = copy.deepcopy(model)
    for layer in turned.model.layers:
        attention = layer.self_attn
        h_DD = matrix(attention.head_dim, torch.float32, torch.device("cpu"))
        for x in (attention.v_proj.weight, attention.v_proj.bias):
            if x is not None:
                x.data = torch.einsum("de,he...->hd...", h_DD, x.data.unflatten(0, (-1, len(h_DD)))).flatten(0, 1)
        out = attention.o_proj.weight.data
        attention.o_proj.weight.data = (out.unflatten(1, (-1, len(h_DD))) @ h_DD).flatten(1)
    return turned


@pytest.mark.parametrize("inner", [Exact(), conf_tree.member("codec", "int8"), conf_tree.member("codec", "int4_token")])  # type: ignore[abstract]
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # two query heads read a value head; the second has biases
def test_turning_as_tokens_are_stored_equals_turned_projections(family: str, inner: Codec) -> None:
    model = build(config(family), NAME)
    plain, turned = Engine(model, torch.float32), Engine(fused(model), torch.float32)
    rows = [
        plain.compress(plain.prefill(ids(CONTEXT)), Stack(values=Hadamard(inner=inner))),
        turned.compress(turned.prefill(ids(CONTEXT)), Stack(values=inner)),
    ]
    assert rows[0].bytes().allocated == rows[1].bytes().allocated
    for step in range(4):
        tokens = ids(5 if step == 0 else 1, seed=step)
        (rows[0],), found = plain.feed([rows[0]], [tokens])
        (rows[1],), expected = turned.feed([rows[1]], [tokens])
        # A number in the middle of two codes may fall to either side in a product that is summed in another order.
        assert float((found - expected).abs().max()) <= (1e-5 if not inner.lossy else 1e-3)
    unturned = plain.compress(plain.prefill(ids(CONTEXT)), Stack(values=inner))
    if inner.name == "int4_token":
        (unturned,), other = plain.feed([unturned], [ids(5, seed=0)])
        full = plain.feed([plain.prefill(ids(CONTEXT)).row], [ids(5, seed=0)])[1]
        assert float((other - full).abs().max()) > 1e-3, "what the codec loses is more than that"
