"""Layers that read another layer's store, in a model without per-layer inputs: all logits of a chunk are had."""

from __future__ import annotations

import torch

from harness.engine.engine import Engine
from harness.families.tiny import build, tiny_config
from tests.support.tiny_models import ids


def test_a_chunk_of_a_stream_has_a_logit_for_every_token() -> None:
    config = tiny_config("gemma4_text")
    config.hidden_size_per_layer_input = 0
    engine = Engine(build(config, "kv_harness"), torch.float32)
    whole = engine.read([engine.start(total=12)], [ids(12)]).logits_BLV
    parts, cache = [], engine.start(total=12)
    for at in (0, 5, 11):
        step = engine.read([cache], [ids(12)[at : {0: 5, 5: 11, 11: 12}[at]]])
        (cache,), chunk = step.rows, step.logits_BLV
        parts.append(chunk)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
