"""The keep oracles pinned by numbers worked out by hand; nothing of the harness is imported here."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.oracles import keep
from tests.support.oracles.hand import C, keys, queries

# --- attention ---------------------------------------------------------------------------------------------------


def test_weights_are_the_fractions() -> None:
    w_TT = keep.attention_weights(queries(1), keys(C))[0]
    assert w_TT[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert w_TT[2].tolist() == pytest.approx([4 / 8, 1 / 8, 3 / 8, 0, 0, 0])
    assert w_TT[5].tolist() == pytest.approx([4 / 24, 1 / 24, 3 / 24, 2 / 24, 6 / 24, 8 / 24])


def test_weights_in_a_sliding_window_of_two() -> None:
    w_TT = keep.attention_weights(queries(1), keys(C), window=2)[0]
    assert w_TT[5].tolist() == pytest.approx([0, 0, 0, 0, 6 / 14, 8 / 14])  # itself and the one before


def test_query_heads_read_their_own_kv_head() -> None:
    flat = [1] * 6
    w_QTT = keep.attention_weights(queries(1, 1, 1, 1), keys(C, flat))  # heads 0, 1 -> KV 0; heads 2, 3 -> KV 1
    assert w_QTT[1, 1].tolist() == pytest.approx([4 / 5, 1 / 5, 0, 0, 0, 0])
    assert w_QTT[2, 1].tolist() == pytest.approx([1 / 2, 1 / 2, 0, 0, 0, 0])


def test_weights_equal_torch_on_random_tensors() -> None:
    g = torch.Generator().manual_seed(0)
    q_QTD, k_HTD = torch.randn(4, 9, 8, generator=g), torch.randn(2, 9, 8, generator=g)
    logits = q_QTD.double() @ k_HTD.double().repeat_interleave(2, 0).mT / math.sqrt(8)
    expected = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(keep.attention_weights(q_QTD, k_HTD).double(), expected, atol=1e-7, rtol=0)


# --- keep --------------------------------------------------------------------------------------------------------

# Column sums of C: c_j x (1/P_j + ... + 1/P_5), P the running sums; 1/P = .25 .2 .125 .1 .0625 .0416667
#   j=0: 4 x .7791667 = 3.1166667   j=1: 1 x .5291667   j=2: 3 x .3291667 = .9875
#   j=3: 2 x .2041667 = .4083333    j=4: 6 x .1041667 = .625   j=5: 8 x .0416667 = .3333333   (sum 6: six queries)
H2O = [3.1166667, 0.5291667, 0.9875, 0.4083333, 0.625, 0.3333333]
# Column sums of a uniform head: 1/(j+1) + ... + 1/6 (sum 6 again)
UNIFORM = [2.45, 1.45, 0.95, 0.6166667, 0.3666667, 0.1666667]


def test_h2o_column_sums_and_kept_set() -> None:
    assert keep.h2o_scores(queries(1), keys(C))[0] == pytest.approx(H2O)
    # budget 4 = sink 0 + recent 5 + the two best of 1..4, which are 2 (.99) and 4 (.63)
    assert keep.keep_h2o(queries(1), keys(C), budget=4, sinks=1, recent=1) == [[0, 2, 4, 5]]
    # recent not given: (4 - 1) // 2 = 1, the same set; without sinks: 4 // 2 = 2 recent and the best two of 0..3
    assert keep.keep_h2o(queries(1), keys(C), budget=4, sinks=1) == [[0, 2, 4, 5]]
    assert keep.keep_h2o(queries(1), keys(C), budget=4) == [[0, 2, 4, 5]]
    assert keep.keep_h2o(queries(1), keys(C), budget=3) == [[0, 2, 5]]  # recent 3 // 2 = 1


def test_recent_is_half_of_what_the_sinks_leave() -> None:
    assert [keep.default_recent(b, s) for b, s in ((64, 4), (65, 4), (64, 0), (4, 4))] == [30, 30, 32, 0]


def test_h2o_scores_are_the_mean_over_the_group() -> None:
    mean = [(a + b) / 2 for a, b in zip(H2O, UNIFORM, strict=True)]  # 2.783 .990 .969 .513 .496 .25
    assert keep.h2o_scores(queries(1, 0), keys(C))[0] == pytest.approx(mean)
    assert keep.keep_h2o(queries(1, 0), keys(C), budget=3, sinks=1, recent=1) == [[0, 1, 5]]  # alone it was 2


def test_h2o_kept_sets_differ_between_kv_heads() -> None:
    kept = keep.keep_h2o(queries(1, 0), keys(C, C), budget=3, sinks=1, recent=1)  # one query head a KV head
    assert kept == [[0, 2, 5], [0, 1, 5]]


def test_streaming_and_the_plain_window() -> None:
    assert keep.keep_streaming(6, 4, sinks=1, heads=2) == [[0, 3, 4, 5], [0, 3, 4, 5]]
    assert keep.keep_streaming(6, 4, sinks=0) == [[2, 3, 4, 5]]
    assert keep.keep_streaming(6, 6, sinks=4) == [[0, 1, 2, 3, 4, 5]]


def test_snapkv_pools_before_it_chooses() -> None:
    # queries 4 and 5 over keys 0..3: c x (1/16 + 1/24) = c x .1041667; pooled by 3: 4 4 3 3
    scores = keep.snapkv_scores(queries(1), keys(C), window=2, kernel=3)[0]
    assert scores == pytest.approx([4 * 0.1041667, 4 * 0.1041667, 3 * 0.1041667, 3 * 0.1041667])
    assert keep.keep_snapkv(queries(1), keys(C), 4, window=2, kernel=3) == [[0, 1, 4, 5]]
    assert keep.keep_snapkv(queries(1), keys(C), 4, window=2, kernel=1) == [[0, 2, 4, 5]]  # no pooling: 4 and 3
    assert keep.keep_snapkv(queries(1), keys(C), 5, window=2, kernel=3) == [[0, 1, 2, 4, 5]]  # 2 and 3 tie: 2


def test_snapkv_takes_the_mean_of_the_group_before_pooling() -> None:
    # second head uniform over keys 0..3: 1/5 + 1/6 = .3666667 each; the mean keeps the order 0 2 3 1
    scores = keep.snapkv_scores(queries(1, 0), keys(C), window=2, kernel=1)[0]
    assert scores == pytest.approx([(c * 0.1041667 + 0.3666667) / 2 for c in C[:4]])
    # two heads that peak at different keys: the mean of the pools would be (4+2)/2 at key 0, the pool of the mean is less
    one, two = keep.max_pool([4, 0, 0, 0], 3), keep.max_pool([0, 2, 0, 0], 3)
    assert [(a + b) / 2 for a, b in zip(one, two, strict=True)] == [3, 3, 1, 0]
    assert keep.max_pool([2, 1, 0, 0], 3) == [2, 2, 1, 0]


def test_max_pool_knows_no_padding_value() -> None:
    assert keep.max_pool([-5, -7, -9], 3) == [-5, -5, -7]
    assert keep.max_pool([1, 2, 3, 4, 5, 6, 7, 8, 9], 7) == [4, 5, 6, 7, 8, 9, 9, 9, 9]


def test_tova_last_query_one_set_for_all_heads() -> None:
    # last query: c / 24, so 8 (5), 6 (4), 4 (0); nothing protects the last row, it is there because it is heavy
    assert keep.keep_tova(queries(1), keys(C), 3) == [[0, 4, 5]]
    # KV head 1 has c = 1 1 1 1 1 19: weights 1/24 .. 19/24; the mean of 24ths: 2.5 1 2 1.5 3.5 13.5
    assert keep.tova_scores(queries(1, 1), keys(C, [1, 1, 1, 1, 1, 19])) == pytest.approx(
        [2.5 / 24, 1 / 24, 2 / 24, 1.5 / 24, 3.5 / 24, 13.5 / 24]
    )
    assert keep.keep_tova(queries(1, 1), keys(C, [1, 1, 1, 1, 1, 19]), 2) == [[4, 5], [4, 5]]


def test_tova_may_drop_the_last_token() -> None:
    assert keep.keep_tova(queries(1), keys([4, 2, 3, 6, 8, 1]), 3) == [[0, 3, 4]]


def test_key_norm_keeps_the_smallest_and_the_earlier_of_equals() -> None:
    k_HTD = torch.zeros(1, 6, 2)
    for t, (a, b) in enumerate([(3, 4), (0, 1), (0, 2), (6, 8), (1, 0), (0, 4)]):  # norms 5 1 2 10 1 4
        k_HTD[0, t] = torch.tensor([a, b])
    assert keep.knorm_scores(k_HTD)[0] == pytest.approx([-5, -1, -2, -10, -1, -4])
    assert keep.keep_knorm(k_HTD, 3, sinks=0, recent=0) == [[1, 2, 4]]
    assert keep.keep_knorm(k_HTD, 1, sinks=0, recent=0) == [[1]]  # 1 and 4 tie
    assert keep.keep_knorm(k_HTD, 4, sinks=1, recent=1) == [[0, 1, 4, 5]]
    assert keep.keep_knorm(k_HTD, 4, sinks=1) == [[0, 1, 4, 5]]  # recent (4 - 1) // 2 = 1


def test_ties_short_prompts_and_the_refused_budget() -> None:
    assert keep.keep_rows([0.0] * 6, 6, 4, 1, 1) == [0, 1, 2, 5]
    assert keep.keep_rows([0.0] * 6, 6, 4, 2, 2) == [0, 1, 4, 5]  # exactly sinks + recent
    assert keep.keep_rows([0.0] * 6, 6, 9, 4, 4) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="below"):
        keep.keep_rows([0.0] * 60, 60, 16, 4, 32)
    assert keep.margin(H2O, 6, 4, 1, 1) == pytest.approx(0.625 - 0.5291667)
    assert keep.margin([0.0] * 6, 6, 4, 1, 1) == 0


def test_a_fraction_is_rounded_up_from_its_decimal() -> None:
    assert keep.tokens_of_fraction(0.07, 100) == 7  # 0.07 * 100 is 7.000000000000001 in floating point
    assert keep.tokens_of_fraction(0.2, 525) == 105
    assert keep.tokens_of_fraction(0.1, 1001) == 101
    assert keep.tokens_of_fraction("1e-3", 10) == 1
    assert keep.tokens_of_fraction(1, 17) == 17


def test_protection_check_accepts_and_rejects() -> None:
    keep.check_protected([[0, 2, 5], [0, 4, 5]], 6, 3, 1, 1)
    for wrong in ([[0, 2, 4]], [[1, 2, 5]], [[0, 5]], [[0, 5, 2]], [[0, 5, 5]]):
        with pytest.raises(AssertionError):
            keep.check_protected(wrong, 6, 3, 1, 1)
