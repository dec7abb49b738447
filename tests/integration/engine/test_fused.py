"""Many rows in one wave equal each row alone: logits, kept sets and answers; forks, order of rows, full budgets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch

from harness.engine.answers import Answer, Ask, Prefix
from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids

EVERYTHING = conf_tree.everything()
CONTEXTS = (150, 97, 120)
QUESTIONS = (9, 17, 5)
NEW = 8


@lru_cache
def engine(family: str = "llama") -> Engine:
    return tiny_models.engine(family)


@lru_cache
def prefix(example: int, family: str = "llama") -> Prefix:
    return engine(family).prefill(ids(CONTEXTS[example], seed=example), EVERYTHING)


def stacks() -> list[Stack]:
    """Every member of conf/compress with a budget, at two points; of those without, one of each kind of codec."""
    found = []
    kinds: dict[tuple[object, ...], Stack] = {}
    for name in conf_tree.members("compress"):
        stack = conf_tree.stack(name)
        if stack.keep is None:
            kinds.setdefault((type(stack.keys), stack.keys.flush, type(stack.values)), stack)
        else:
            found += [conf_tree.stack(name, f"keep.budget.value={f}") for f in (0.4, 0.7)]
    return [*kinds.values(), *found]


def rows(family: str = "llama") -> list[tuple[SequenceCache, list[int]]]:
    """One row for every stack and example, with its question."""
    return [
        (engine(family).compress(prefix(e, family), stack, seed=e), ids(QUESTIONS[e], seed=10 + e))
        for e in range(len(CONTEXTS))
        for stack in stacks()
        if not stack.unrotated or None not in engine(family).ropes
    ]


def positions(row: SequenceCache) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in row.kept_positions()]


def ask(row: SequenceCache, held: Sequence[int]) -> Ask:
    return Ask(row=row, held=held, max_new=NEW)


def same(a: Answer, b: Answer) -> None:
    assert a.ids == b.ids
    assert a.stop_reason == b.stop_reason
    assert positions(a.row) == positions(b.row)
    assert a.row.bytes().total == b.row.bytes().total
    assert a.peak == b.peak


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_every_row_of_a_wave_equals_it_alone(family: str) -> None:
    run, work = engine(family), rows(family)
    assert len(work) >= 48
    wave, feed = [row for row, _ in work], [question for _, question in work]
    alone = [row for row, _ in work]
    for _ in range(4):
        wave, logits = run.feed(wave, feed)
        for b, (row, tokens) in enumerate(zip(alone, feed, strict=True)):
            (alone[b],), single = run.feed([row], [tokens])
            assert float((logits[b] - single[0]).abs().max()) <= 1e-4
            assert positions(wave[b]) == positions(alone[b])
        feed = [[int(token)] for token in logits.argmax(-1)]


def test_answers_of_a_wave_equal_those_alone_in_any_order() -> None:
    run, work = engine(), rows()
    fused = run.answer([ask(*one) for one in work])
    for one, answer in zip(work, fused, strict=True):
        same(answer, run.answer([ask(*one)])[0])
    order = torch.randperm(len(work), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = run.answer([ask(*work[i]) for i in order])
    for i, answer in zip(order, shuffled, strict=True):
        same(answer, fused[i])


def test_case_26_rows_of_prompts_of_20_and_200_tokens() -> None:
    run, stack = engine(), Stack(keep=conf_tree.keep("sink_h2o", 64), phase="always")
    contexts = [run.prefill(ids(n, seed=n), EVERYTHING) for n in (20, 200)]
    work = [(run.compress(p, stack), ids(3, seed=1)) for p in contexts]
    fused = run.answer([ask(*one) for one in work])
    for one, answer in zip(work, fused, strict=True):
        same(answer, run.answer([ask(*one)])[0])
    assert fused[0].row.held()[0] == [20 + 3 + NEW - 1] * 2
    assert fused[1].row.held()[0] == [64] * 2


def test_rows_that_finish_early_leave_and_the_others_go_on() -> None:
    run, work = engine(), rows()[:6]
    limits = (1, 8, 3, 1, 5, 2)
    asks = [Ask(row=row, held=held, max_new=n) for (row, held), n in zip(work, limits, strict=True)]
    answers = run.answer(asks)
    assert [len(a.ids) for a in answers] == list(limits)
    assert [a.row.seen - row.seen - len(held) for a, (row, held) in zip(answers, work, strict=True)] == [n - 1 for n in limits]
    for one, answer in zip(asks, answers, strict=True):
        same(answer, run.answer([one])[0])


def test_case_48_any_end_token_ends_an_answer_and_is_left_out() -> None:
    plain = engine().answer([ask(*rows()[0])])[0]
    for eos in {plain.ids[2], plain.ids[4]}:
        first = plain.ids.index(eos)
        found = Engine(engine().model, torch.float32, eos=[1, eos]).answer([ask(*rows()[0])])[0]
        assert found.ids == plain.ids[:first]
        assert found.stop_reason == "eos"


def test_a_stop_sees_all_ids_and_ends_the_answer() -> None:
    row, held = rows()[0]
    found = engine().answer([Ask(row=row, held=held, max_new=NEW, stop=lambda seen: len(seen) == 3)])[0]
    assert len(found.ids) == 3
    assert found.stop_reason == "stop"


# --- forks -------------------------------------------------------------------------------------------------------


def digest(row: SequenceCache) -> str:
    tensors = [t.contiguous().cpu().view(torch.uint8) for part in row.head_groups for _, t in part.tensors()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def test_a_row_can_be_asked_twice_and_the_prefix_never_changes() -> None:
    run, whole = engine(), prefix(0)
    before = digest(whole.row)
    stats = [t.clone() for s in whole.stats for t in (s.column_sums_HN, s.queries_QWD) if t is not None]
    for stack in stacks():
        row = run.compress(whole, stack)
        state = digest(row)
        first, other, second = (run.answer([ask(row, ids(n, seed=n))])[0] for n in (9, 30, 9))
        same(first, second)
        assert digest(row) == state
        same(first, run.answer([ask(row, ids(9, seed=9)), ask(row, ids(30, seed=30))])[0])
        assert other.row.seen == row.seen + 30 + NEW - 1
    assert digest(whole.row) == before
    now = [t for s in whole.stats for t in (s.column_sums_HN, s.queries_QWD) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(stats, now, strict=True))


def test_case_18_the_first_answer_token_reads_the_compressed_cache() -> None:
    """One held-back token, one new token: a budget of 4 moves the logits of the very first one."""
    run, whole = engine(), prefix(0)
    held = ids(1, seed=3)
    exact, tight, loose = (
        run.feed([run.compress(whole, s)], [held])[1]
        for s in (Stack(), Stack(keep=conf_tree.keep("knorm", 4)), Stack(keep=conf_tree.keep("knorm", 1000)))
    )
    assert float((exact - tight).abs().max()) > 1e-2
    assert torch.equal(exact, loose)


# --- full budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in conf_tree.members("compress") if conf_tree.stack(n).keep is not None])
def test_a_full_budget_gives_the_baseline_answers_token_for_token(name: str) -> None:
    stack = conf_tree.stack(name, "keep.budget.value=1.0")
    stack = Stack(keep=stack.keep, phase="prefill")  # under `always` a full budget still evicts once the answer grows
    for e in range(len(CONTEXTS)):
        whole, held = prefix(e), ids(QUESTIONS[e], seed=e)
        base, full = (engine().answer([ask(engine().compress(whole, s, seed=e), held)])[0] for s in (Stack(), stack))
        assert full.ids == base.ids
        assert full.row.bytes().allocated == base.row.bytes().allocated
        assert engine().compress(whole, stack, seed=e).touched() == 0


@pytest.mark.parametrize("name", [n for n in conf_tree.members("compress") if conf_tree.stack(n).phase == "always"])
def test_a_budget_that_holds_the_answer_too_gives_the_baseline_under_always(name: str) -> None:
    stack = conf_tree.stack(name, "keep.budget.unit=tokens", "keep.budget.value=1000")
    stack = Stack(keep=stack.keep, phase="always")
    whole, held = prefix(0), ids(9)
    base, full = (engine().answer([ask(engine().compress(whole, s), held)])[0] for s in (Stack(), stack))
    assert full.ids == base.ids


def test_always_holds_its_budget_at_every_step_and_the_peak_says_what_came_before() -> None:
    for name in ("h2o", "sink_h2o_int8", "tova", "streaming"):
        stack = conf_tree.stack(name, "keep.budget.unit=tokens", "keep.budget.value=48")
        row = engine().compress(prefix(0), stack)
        at_context = row.bytes().total
        answer = engine().answer([ask(row, ids(9))])[0]
        assert answer.row.held() == [[48, 48]] * 3
        assert answer.row.bytes().total == at_context
        assert answer.peak == at_context * 57 // 48  # the question's nine rows, before they were evicted


def test_padding_of_a_wave_never_stands_beyond_the_models_positions() -> None:
    """A row at the end of gpt2's learned positions beside one that is fed more tokens."""
    run = engine("gpt2")
    full, short = run.prefill(ids(1020)).row, run.prefill(ids(10)).row
    work = [(full, ids(2, seed=1)), (short, ids(30, seed=2))]
    rows, logits = run.feed([r for r, _ in work], [t for _, t in work])
    for b, (row, tokens) in enumerate(work):
        (_,), single = run.feed([row], [tokens])
        assert float((logits[b] - single[0]).abs().max()) <= 1e-4
    assert [row.seen for row in rows] == [1022, 40]
