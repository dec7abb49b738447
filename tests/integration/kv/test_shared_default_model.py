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
from tests.support.repeated_heads import with_repeated_heads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lm() -> LM:
    return load(configured("smollm2"), NAME)


def test_its_mha_form_pooled_back_gives_the_same_answers_at_a_third_of_the_bytes(lm: LM) -> None:
    context = lm.tokens.encode(Path(__file__).read_text())[:400]
    questions = [lm.tokens.encode(text) for text in ("What is pooled? ", "def test_", "The number of heads is ")]
    engines = [Engine(model, torch.bfloat16) for model in (lm.model, with_repeated_heads(lm.model, 3))]
    rows = [engines[0].prefill(context).row]
    rows.append(engines[1].compress(engines[1].prefill(context), Stack(share=PooledHeads(groups=3))))
    answers = [
        [engine.answer([Ask(row=row, held=tuple(ids), max_new=12, stop=lambda out: False)])[0].ids for ids in questions]
        for engine, row in zip(engines, rows, strict=True)
    ]
    assert answers[0] == answers[1]
    assert rows[0].bytes().total == rows[1].bytes().total == 400 * 23_040
    assert engines[1].shape.full_bytes(400, 2) == 3 * 400 * 23_040
