"""Sharing on the default model: its MHA form pooled back, and every share against slow oracles on real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.models.load import LM, load
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.stack import Stack
from tests.integration.models.test_model_load import configured
from tests.support import conf_tree, share_oracles
from tests.support.changed_reference import Changed
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.repeated_heads import with_repeated_heads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lm() -> LM:
    return load(configured("smollm2"), NAME)


def test_its_mha_form_pooled_back_gives_the_same_answers_at_a_third_of_the_bytes(lm: LM) -> None:
    n = 200
    context = lm.tokens.encode(Path(__file__).read_text())[:n]
    questions = [lm.tokens.encode(text) for text in ("What is pooled? ", "def test_", "The number of heads is ")]
    engines = [Engine(model, torch.bfloat16) for model in (lm.model, with_repeated_heads(lm.model, 3))]
    rows = [engines[0].prefill(context).row]
    rows.append(engines[1].compress(engines[1].prefill(context), Stack(share=PooledHeads(groups=3))))
    answers = [
        [engine.answer([Ask(row=row, held=tuple(ids), max_new=12, stop=lambda out: False)])[0].ids for ids in questions]
        for engine, row in zip(engines, rows, strict=True)
    ]
    assert answers[0] == answers[1]
    assert rows[0].bytes().total == rows[1].bytes().total == n * 23_040
    assert engines[1].shape.full_bytes(n, 2) == 3 * n * 23_040


PAIRS = [(layer, layer + 1) for layer in range(15, 29, 2)]  # of 30 layers
RULES = {
    "mqa_pool": share_oracles.pooled(1),
    "cla2": share_oracles.read_from({layer: layer - 1 for layer in range(1, 30, 2)}),
    "yoco": share_oracles.read_from(dict.fromkeys(range(16, 30), 15)),
    "minicache": share_oracles.minicache(PAIRS, 0.6, 0.05),
}


@pytest.mark.parametrize("name", RULES)
def test_every_share_equals_its_slow_oracle_on_real_text(name: str, lm: LM) -> None:
    context = lm.tokens.encode(Path(__file__).read_text())[:60]
    engine = Engine(lm.model, torch.float32)
    reference = Changed(load(configured("smollm2"), REFERENCE).model, [None] * 30, RULES[name])
    row = engine.compress(engine.prefill(context), conf_tree.stack(name))
    reference.feed(context, None)
    tokens = lm.tokens.encode("What is pooled?")
    for _ in range(3):
        expected = reference.feed(tokens, row.kept_positions())
        (row,), logits = engine.feed([row], [tokens])
        assert float((logits[0] - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
        tokens = [int(expected.argmax())]
