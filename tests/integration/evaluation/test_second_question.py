"""A compressed context that is asked 1, 2, 1: the same answers, rows and bytes, one prefill; and as the command records it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tasks.needle import Needle
from tests.integration.commands.test_command import TINY, harness, records
from tests.support import conf_tree, tiny_models
from tests.support.asking import owned
from tests.support.tiny_models import ids

STACKS = conf_tree.members("compress")
LIMIT = 4 << 30


class Counting(Engine):
    """An engine that counts how often it reads a context."""

    prefills = 0

    def prefill(self, ids: Sequence[int], needs: Needs = Needs()) -> Prefix:  # noqa: B008 frozen
        self.prefills += 1
        return super().prefill(ids, needs)


def served(engine: Engine, jobs: Sequence[Question[Any]]) -> list[Result[Any]]:
    """Results in the order of the jobs; a job's owner is its place."""
    found = owned(engine, jobs, LIMIT)
    return [found[at] for at in range(len(jobs))]


def rows_of(one: Result) -> list[list[list[int]]]:
    assert one.row is not None
    return [[head.tolist() for head in layer] for layer in one.row.kept_positions()]


def ask(context: Sequence[int], questions: Sequence[Sequence[int]], stacks: Sequence[Stack], new: int) -> list[Question[Any]]:
    asked = [(stack, question) for stack in stacks for question in questions]
    return [
        Question(owner=at, prefix=tuple(context), held=tuple(question), stack=stack, max_new=new, seed=5)
        for at, (stack, question) in enumerate(asked)
    ]


# The default model is asked under one stack of each kind of store, phase and split; a tiny model under every one there is.
KINDS = ("full", "int8", "int4", "kivi2", "hadamard_int4", "fp8_e4m3", "k2token", "h2o", "sink_h2o_int8", "h2o_chunked",
         "streaming", "streaming_cache", "random", "adakv", "pyramidkv", "duo")  # fmt: skip


def halved(names: Sequence[str]) -> list[Stack]:
    half = ["keep.budget.value=0.5"]
    return [conf_tree.stack(name, *(half if conf_tree.stack(name).keep else [])) for name in names]


def check(
    engine: Counting, names: Sequence[str], prompt: tuple[Sequence[int], Sequence[int], Sequence[int]], new: int
) -> list[Result[Any]]:
    """These stacks of conf/compress, all of them and both questions after the context on one prefill."""
    (context, one, two), stacks = prompt, halved(names)
    assert {"prefill", "always", "chunked"} <= {stack.phase for stack in stacks}
    found = served(engine, ask(context, (one, two, one), stacks, new))
    assert engine.prefills == 1
    for at, stack in enumerate(stacks):
        first, other, again = found[3 * at : 3 * at + 3]
        assert first.status == other.status == again.status == "ok", (names[at], first.error)
        assert first.answer and other.answer and again.answer
        assert first.answer.ids == again.answer.ids, names[at]
        assert first.answer.row.seen == again.answer.row.seen == len(context) + len(one) + len(first.answer.ids) - 1
        assert rows_of(first) == rows_of(other) == rows_of(again), names[at]
        assert first.context == other.context == again.context
        assert first.final.bytes() == again.final.bytes()
        if stack.phase == "always" and stack.keep is not None:  # what the answer pushed out is its own fork's affair
            assert first.row is not None and first.row.held() == first.final.held()
    return found


def test_answers_1_2_1_on_one_context() -> None:
    engine = Counting(tiny_models.tiny("llama"), torch.float32)
    context, one, two, stacks = ids(150), ids(9, seed=1), ids(14, seed=2), halved(STACKS)
    found = check(engine, STACKS, (context, one, two), 8)
    backwards = served(engine, ask(context, (two, one), stacks, 8))
    for at in range(len(stacks)):
        (two_first, one_later), (one_first, two_later, _) = backwards[2 * at : 2 * at + 2], found[3 * at : 3 * at + 3]
        assert two_first.answer and one_later.answer and one_first.answer and two_later.answer
        assert (one_later.answer.ids, two_first.answer.ids) == (one_first.answer.ids, two_later.answer.ids)
    assert engine.prefills == 2


@pytest.mark.slow
def test_answers_1_2_1_on_the_default_model() -> None:
    from harness.models.load import load
    from tests.integration.models.test_model_load import configured

    lm = load(configured("smollm2"), "kv_harness")
    corpus = instantiate(OmegaConf.load(conf_tree.CONF / "corpus" / "kjv.yaml"))
    examples = Needle(lengths=(280,), depths=(0.25,), questions=2).examples(lm.tokens, corpus, seed=0)
    prompts = [lm.tokens.prompt(e.context, e.question, e.answer_prefix, chat=False).split(False) for e in examples]
    (context, one), (same, two) = prompts
    assert context == same
    check(Counting(lm.model, lm.kv_dtype), KINDS, (context, one, two), 3)


@pytest.fixture(scope="module", params=["blind", "first"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """(what the question may be seen for, records) of two questions on each context, through the command."""
    cwd, how = tmp_path_factory.mktemp("run"), str(request.param)
    aware = [] if how == "blind" else ["task.query_aware=true", "task.aware_of=first"]
    stacks = (
        "stacks=[[random,'compress.points=[{keep.budget.value: 0.5}]'],[tova,'compress.points=[{keep.budget.value: 0.5}]']]"
    )
    out = harness(*TINY, "task.questions=2", "limit=4", *aware, stacks, cwd=cwd)
    assert out.returncode == 0, out.stderr
    assert "first questions" in out.stdout
    return how, records(cwd / Path(out.stdout.strip().splitlines()[-1]))


def test_questions_of_one_context_share_what_they_should(asked: tuple[str, list[dict]]) -> None:
    how, found = asked
    assert len(found) == 4 * 3
    assert {r["query_aware"] for r in found} == {how != "blind"}
    for stack in ("full", "random", "tova"):
        mine = sorted((r for r in found if r["stack"] == stack), key=lambda r: r["example_id"])
        assert [r["order"] for r in mine] == [1, 2, 1, 2]
        for one, two in zip(mine[::2], mine[1::2], strict=True):
            assert one["group_id"] == two["group_id"] and one["gold"] != two["gold"]
            assert one["prompt_sha256"] != two["prompt_sha256"]
            for name in ("kv_bytes_context", "tokens_seen", "tokens_kept", "entries_touched", "bytes"):
                assert one[name] == two[name]
            assert one["timings"]["prefill_s"] == two["timings"]["prefill_s"]  # seconds of the very same forward
