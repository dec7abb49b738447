"""The stepwise oracles pinned by numbers worked out by hand; nothing of the harness is imported here."""

from __future__ import annotations

import pytest
import torch

from tests.support.oracles import keep, steps
from tests.support.oracles.hand import C, keys, queries


def test_streaming_steps() -> None:
    got = [s.kept[0] for s in steps.run_streaming_steps([4, 1, 2], budget=3, sinks=1)]
    assert got == [[0, 2, 3], [0, 3, 4], [0, 5, 6]]


def test_h2o_steps_drop_the_score_with_the_row() -> None:
    # c = 4 1 3 2 | 30 | 8, budget 3 = sink 0, recent 1, heavy 1.
    # prompt: S0 = 4 x (.25+.2+.125+.1) = 2.7, S1 = .425, S2 = 3 x .225 = .675, S3 = 2 x .1 = .2  -> 2 stays beside 0 and 3
    # token 4 over 0 2 3 4: c 4 3 2 30, sum 39: S2 = .675 + 3/39 = .751923, S3 = .2 + 2/39 = .251282, S4 = 30/39 -> 0 2 4
    # token 5 over 0 2 4 5: c 4 3 30 8, sum 45: S2 = .751923 + 3/45 = .818590, S4 = 30/39 + 30/45 = 1.435897 -> 0 4 5
    k_HTD = keys([4, 1, 3, 2, 30, 8])
    got = steps.run_h2o_steps([queries(1, tokens=4), queries(1, tokens=1), queries(1, tokens=1)], k_HTD, 3, 1, 1)
    assert [s.kept[0] for s in got] == [[0, 2, 3], [0, 2, 4], [0, 4, 5]]
    assert got[0].scores[0] == pytest.approx([2.7, 0.675, 0.2])
    assert got[1].scores[0] == pytest.approx([2.7 + 4 / 39, 0.675 + 3 / 39, 30 / 39])
    assert got[2].scores[0] == pytest.approx([2.7 + 4 / 39 + 4 / 45, 30 / 39 + 30 / 45, 8 / 45])


def test_h2o_step_of_two_tokens_is_causal_and_adds_both() -> None:
    # after the prompt as above (0 2 3); tokens 4 (c 6) and 5 (c 8) come together:
    # query 4 sees 4+3+2+6 = 15, query 5 sees 23. S2 = .675+3/15+3/23, S3 = .2+2/15+2/23, S4 = 6/15+6/23, S5 = 8/23
    #   = 1.005435, .420290, .660870, .347826 -> 2 stays beside 0 and 5
    got = steps.run_h2o_steps([queries(1, tokens=4), queries(1, tokens=2)], keys(C), 3, 1, 1)
    assert got[1].kept == [[0, 2, 5]]
    assert got[1].scores[0] == pytest.approx([2.7 + 4 / 15 + 4 / 23, 0.675 + 3 / 15 + 3 / 23, 8 / 23])


def test_h2o_steps_start_from_a_prompt_below_the_budget() -> None:
    # 2 + 1 + 1 tokens, budget 3: nothing goes until the fourth. c = 4 1 3 2:
    # S1 = 1/5 + 1/8 + 1/10 = .425, S2 = 3/8 + 3/10 = .675 -> 2
    got = steps.run_h2o_steps([queries(1, tokens=n) for n in (2, 1, 1)], keys([4, 1, 3, 2]), 3, 1, 1)
    assert [s.kept[0] for s in got] == [[0, 1], [0, 1, 2], [0, 2, 3]]


def test_h2o_steps_without_eviction_are_the_column_sums() -> None:
    got = steps.run_h2o_steps([queries(1, 0, tokens=n) for n in (3, 1, 2)], keys(C), 6, 1, 1)
    assert got[-1].scores[0] == pytest.approx(keep.h2o_scores(queries(1, 0), keys(C))[0])


def test_h2o_steps_read_older_rows_as_stored() -> None:
    # prompt of 2 exact (c 4 1): S = 1 + 4/5, 1/5; token 2 (c 3) reads the first two as stored, c 2 2: sum 7
    stored = keys([2, 2, 2])
    got = steps.run_h2o_steps([queries(1, tokens=2), queries(1, tokens=1)], keys([4, 1, 3]), 3, k_stored_HTD=stored)
    assert got[1].scores[0] == pytest.approx([1.8 + 2 / 7, 0.2 + 2 / 7, 3 / 7])


def test_tova_steps() -> None:
    # c = 4 1 3 2 | 30 | 8: budget 3. prompt, query 3: 4 1 3 2 -> 0 2 3; token 4 over 0 2 3 4: 4 3 2 30 -> 0 2 4;
    # token 5 over 0 2 4 5: 4 3 30 8 -> 0 4 5
    k_HTD = keys([4, 1, 3, 2, 30, 8])
    got = steps.run_tova_steps([queries(1, tokens=4), queries(1, tokens=1), queries(1, tokens=1)], k_HTD, 3)
    assert [s.kept for s in got] == [[[0, 2, 3]], [[0, 2, 4]], [[0, 4, 5]]]
    assert got[2].scores[0] == pytest.approx([4 / 45, 30 / 45, 8 / 45])
    # both tokens in one step: the last query alone decides, over 0 2 3 4 5: 4 3 2 30 8 -> 0 4 5
    pair = queries(1, tokens=2)
    pair[:, 0] = 0  # the first of the two would weigh all alike
    both = steps.run_tova_steps([queries(1, tokens=4), pair], k_HTD, 3)
    assert both[1].kept == [[0, 4, 5]]
    assert both[1].scores[0] == pytest.approx([4 / 47, 30 / 47, 8 / 47])


def test_key_norm_steps() -> None:
    k_HTD = torch.tensor([[[5.0], [1.0], [3.0], [2.0], [4.0], [6.0]]])
    got = steps.run_knorm_steps([4, 1, 1], k_HTD, budget=3, sinks=1, recent=1)
    assert [s.kept[0] for s in got] == [[0, 1, 3], [0, 1, 4], [0, 1, 5]]
