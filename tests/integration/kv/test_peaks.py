"""Peaks are watched at every step: stores that flush shrink while they grow, stores that evict are largest just before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.engine.engine import Ask, Engine
from harness.engine.requests import Question, Result
from harness.engine.streams import Reading, context_cache, read
from harness.lm_eval.encoding import Window
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.score.h2o import H2O
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results, windows
from tests.support.tiny_models import build, ids, tiny_a

HEAVY = Stack(keep=Keep(scorer=H2O(), budget=Amount(value=0.25)), phase="always")
ROW = 3 * 2 * (2 * 32 * 4 + 4 + 4)  # of three layers and two KV heads: fp32 keys and values, a position and a score


def served(engine: Engine, job: Question[Any]) -> Result[Any]:
    found = results(engine, [job])
    assert found[0].status == "ok", found[0].error
    return found[0]


def scored(engine: Engine) -> Result[Any]:
    return served(
        engine, Question(owner=None, prefix=tuple(ids(120)), stack=HEAVY, held=tuple(ids(9)), targets=(tuple(ids(20)),))
    )


@pytest.mark.parametrize(("name", "peak"), [("kivi2", 260_096), ("kivi4", 260_096), ("int4", 148_160), ("int2", 127_808)])
def test_a_store_that_flushes_is_largest_just_before(name: str, peak: int) -> None:
    """85 context tokens growing to 131 in a bf16 cache; of KIVI's keys 128 wait exact for one another: 127 rows are the most."""
    engine = Engine(build(tiny_a(), "kv_harness"), torch.bfloat16)
    (answer,) = engine.answer(
        [Ask(row=engine.compress(engine.prefill(ids(85)), conf_tree.stack(name)), held=ids(1), max_new=46)]
    )
    assert answer.row.seen == 131
    assert answer.peak == peak


@pytest.mark.parametrize("name", ["kivi2", "int4", "int8_static"])
def test_streams_and_answers_that_grow_alike_have_one_peak(name: str) -> None:
    engine, stack, tokens = Engine(build(tiny_a(), "kv_harness"), torch.bfloat16), conf_tree.stack(name), tuple(ids(132))
    row = engine.compress(engine.prefill(tokens[:85]), stack)
    (out,) = read(engine, [Reading(ids=tokens, row=row, reference=0)], 1)
    sizes = [row.bytes().total]
    for token in tokens[85:131]:
        (row,), _ = engine.feed([row], [[token]])
        sizes.append(row.bytes().total)
    assert out.row.seen == 131
    assert out.peak == max(sizes)


def test_a_scored_continuation_is_largest_before_its_rows_are_evicted() -> None:
    """120 context tokens, a quarter kept; 9 held and 19 fed target tokens join before anything is evicted."""
    found = scored(tiny_models.engine("llama"))
    assert found.peak == (30 + 9 + 19) * ROW == 91_872
    assert found.final.bytes().total == found.context.total == 30 * ROW == 47_520


def test_an_answer_of_many_tokens_is_largest_before_the_held_ones_push_others_out() -> None:
    job = Question(owner=None, prefix=tuple(ids(120)), stack=HEAVY, held=tuple(ids(9)), max_new=20)
    assert served(tiny_models.engine("llama"), job).peak == (30 + 9) * ROW


def test_a_chunked_context_in_front_of_a_stream_or_a_text_has_the_peak_of_its_reading() -> None:
    """Chunks of 40 join 30 kept rows; the exact context is never held, so it is not in the peak."""
    engine, tokens = tiny_models.engine("llama"), ids(120)
    stack = Stack(keep=conf_tree.keep("streaming", 30), phase="chunked", chunk=40)
    row, peak = context_cache(engine, engine.prefill(tokens), tokens, stack, 0)
    assert peak == 3 * 2 * 70 * (2 * 32 * 4 + 4)
    assert peak == served(engine, Question(owner=None, prefix=tuple(tokens), stack=stack, held=(3,), max_new=1)).peak_prefill
    assert row.bytes().total == 3 * 2 * 30 * (2 * 32 * 4 + 4)


def test_the_peak_of_a_whole_text_is_that_of_its_steps() -> None:
    """A text of 121 tokens for lm-eval: 60 are read exactly, a quarter kept, and chunks of 32 join before rows go."""
    engine = tiny_models.engine("llama")
    text = Window(tuple(ids(121)), 60)
    (found, full) = windows(engine, [text], [HEAVY, Stack()])
    assert found.main.peak == (15 + 32) * ROW
    row = 3 * 2 * 2 * 32 * 4
    sums = 3 * 2 * 60 * 4
    assert found.main.peak_prefill == 60 * row + sums + 15 * ROW
    assert full.main.peak_prefill == 60 * row
    assert full.main.peak == 120 * row
    (short,) = windows(engine, [Window(tuple(ids(40)), 39)], [HEAVY])
    assert short.main.peak_prefill == short.main.peak == 39 * row
