"""Kept sets of the scorers beyond the classics equal their slow oracles on random tensors: shapes, budgets, short prompts."""

from __future__ import annotations

import pytest
import torch

from harness.errors import UserError
from harness.stages.protocols import LayerView, Scorer
from harness.stages.score.chunkkv import ChunkKV
from harness.stages.score.criticalkv import CriticalKV
from harness.stages.score.expected_attention import ExpectedAttention
from harness.stages.score.keydiff import KeyDiff
from harness.stages.score.lagkv import LagKV
from harness.stages.score.scissorhands import Scissorhands
from harness.stages.score.snapkv import SnapKV
from harness.stages.score.vatp import Vatp
from tests.support import conf_tree
from tests.support.kept import same_tokens
from tests.support.oracles import keep as oracle
from tests.support.oracles import policies
from tests.support.oracles.keep import Scores
from tests.support.views import HEADS, HalfRope, chosen, rule, tensors, view

heads = pytest.mark.parametrize("heads", HEADS, ids=str)
SIZES = ((40, 24), (40, 39), (40, 40), (7, 12), (61, 20))  # tokens, budget


def check(scorer: Scorer, found: LayerView, budget: int, scores: Scores, sinks: int, recent: int) -> None:
    """The scorer's kept sets are those of the oracle's scores."""
    kept = chosen(rule(scorer, sinks=sinks, recent=recent), [found], budget)[0]
    assert len(kept) == len(scores)
    for rows, wanted in zip(kept, scores, strict=True):
        padded = [*wanted, *[0.0] * (found.n - len(wanted))]
        same_tokens(rows, oracle.keep_rows(padded, found.n, budget, sinks, recent), padded)


@heads
@pytest.mark.parametrize("window", [1, 5, 400])
def test_scissorhands(heads: tuple[int, int], window: int) -> None:
    for n, budget in SIZES:
        q, k, _ = tensors(*heads, n, seed=n)
        scores = policies.scissorhands_scores(q, k, window)
        found = Scissorhands(window=window).score(view(q, k))
        assert found.tolist() == scores, "counts are whole numbers: equal, not close"
        for sinks, recent in ((0, 10), (4, 3), (0, 0)):
            check(Scissorhands(window=window), view(q, k), budget, scores, sinks, recent)


@heads
def test_keydiff(heads: tuple[int, int]) -> None:
    for n, budget in SIZES:
        q, k, _ = tensors(*heads, n, seed=n)
        scores = policies.keydiff_scores(k)
        torch.testing.assert_close(KeyDiff().score(view(q, k)), torch.tensor(scores), atol=1e-5, rtol=0)
        for sinks, recent in ((0, 0), (4, 6)):
            check(KeyDiff(), view(q, k), budget, scores, sinks, recent)


def test_keydiff_is_the_mean_similarity_to_all_keys_up_to_a_factor() -> None:
    q, k, _ = tensors(4, 2, 30)
    unit = torch.nn.functional.normalize(k, dim=-1)
    ratio = KeyDiff().score(view(q, k)) / (unit @ unit.mT).mean(-1)
    assert float((ratio / ratio[:, :1] - 1).abs().max()) < 1e-3


@heads
def test_vatp(heads: tuple[int, int]) -> None:
    for n, budget in SIZES:
        q, k, v = tensors(*heads, n, seed=n)
        for sinks, recent in ((4, 8), (0, 0)):
            check(Vatp(), view(q, k, v), budget, policies.vatp_scores(q, k, v), sinks, recent)


@heads
@pytest.mark.parametrize(("window", "kernel"), [(8, 7), (1, 1), (20, 5)])
def test_criticalkv(heads: tuple[int, int], window: int, kernel: int) -> None:
    for n, budget in SIZES:
        q, k, v = tensors(*heads, n, seed=n)
        scores = policies.criticalkv_scores(q, k, v, window, kernel, 0.01)
        if budget < window:
            continue
        scorer = CriticalKV(window=window, kernel=kernel, epsilon=0.01)
        check(scorer, view(q, k, v), budget, scores, 0, window)


def test_criticalkv_with_values_of_one_size_is_snapkv() -> None:
    q, k, v = tensors(4, 2, 60)
    ones = torch.ones_like(v)
    pairs = [rule(s, recent=8) for s in (CriticalKV(window=8), SnapKV(window=8))]
    first, second = (chosen(keep, [view(q, k, ones)], 30) for keep in pairs)
    assert first == second


@heads
@pytest.mark.parametrize(("window", "chunk"), [(8, 10), (8, 1), (4, 7), (20, 64)])
def test_chunkkv_keeps_whole_chunks(heads: tuple[int, int], window: int, chunk: int) -> None:
    for n, budget in SIZES:
        q, k, _ = tensors(*heads, n, seed=n)
        if budget < window:
            continue
        kept = chosen(rule(ChunkKV(window=window, chunk=chunk), recent=window), [view(q, k)], budget)[0]
        assert kept == policies.keep_chunkkv(q, k, budget, window, chunk)
        if n <= budget:
            continue
        for rows in kept:
            inside = {row // chunk for row in rows if row < n - window}
            torn = [c for c in inside if len({*range(c * chunk, min((c + 1) * chunk, n - window))} - {*rows})]
            assert len(torn) <= 1, "only the last chunk that was chosen may be cut"


@heads
@pytest.mark.parametrize("lag", [5, 8])
def test_lagkv_takes_as_many_rows_from_every_part(heads: tuple[int, int], lag: int) -> None:
    for n, budget, sinks in ((40, 24, 4), (61, 20, 4), (61, 40, 0), (12, 9, 0), (17, 16, 3)):
        q, k, v = tensors(*heads, n, seed=n)
        kept = chosen(rule(LagKV(lag=lag, sinks=sinks), sinks=sinks, recent=lag), [view(q, k, v)], budget)[0]
        assert kept == policies.keep_lagkv(k, v, budget, lag, sinks), (n, budget)
        for rows in kept:
            parts = range((n - sinks) // lag - 1)
            taken = [sum(sinks + p * lag <= row < sinks + (p + 1) * lag for row in rows) for p in parts]
            assert not taken or max(taken) - min(taken) <= 1


def test_lagkv_scales_a_channel_that_does_not_vary_by_one() -> None:
    q, k, v = tensors(4, 2, 30)
    k[..., 3], v[..., :] = 2.0, 1.0
    assert torch.isfinite(LagKV(lag=5, sinks=0).score(view(q, k, v))).all()


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_expected_attention(heads: tuple[int, int], rotary: bool) -> None:
    rope = HalfRope() if rotary else None

    def rotate(x: list[float], pos: int) -> list[float]:
        return HalfRope().rotate(torch.tensor([x], dtype=torch.float64), torch.tensor([pos]))[0].tolist()

    for n, budget, epsilon in ((24, 12, 0.0), (24, 20, 0.02), (5, 8, 0.0)):
        q, k, v = tensors(*heads, n, seed=n, d=6)
        q = q + 0.5  # a mean worth predicting from
        scores = policies.expected_attention_scores(q, k, v, 9, epsilon, rotate if rotary else None)
        scorer = ExpectedAttention(future=9, epsilon=epsilon)
        found = view(q, k, v, rope=rope)
        torch.testing.assert_close(scorer.score(found), torch.tensor(scores), atol=1e-6, rtol=1e-4)
        for sinks, recent in ((4, 2), (0, 0)):
            check(scorer, found, budget, scores, sinks, recent)


def test_expected_attention_predicts_what_gaussian_queries_do() -> None:
    """Queries drawn from a Gaussian, no rotation: the expected weights are those that many queries give on average."""
    g = torch.Generator().manual_seed(0)
    q, (_, k, v) = 0.7 * torch.randn(2, 20_000, 8, generator=g, dtype=torch.float64) + 0.4, tensors(2, 2, 12, d=8)
    centred = q - q.mean(1, keepdim=True)
    found = view(tensors(2, 2, 12, d=8)[0], k, v)
    stats = type(found.stats)(scaling=8**-0.5, query_mean_QD=q.mean(1), query_cov_QDD=centred.mT @ centred / q.shape[1])
    expected = ExpectedAttention().score(view(found.stats.queries_QWD, k, v, stats=stats, rope=None)) / v.norm(dim=-1)
    weight = (q.float() @ k.mT * 8**-0.5).exp().mean(1)  # E exp(q k): the paper's closed form, before it is normalised
    torch.testing.assert_close(expected, weight / weight.sum(-1, keepdim=True), atol=1e-3, rtol=0.05)


# --- all members of conf/keep ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_query_heads_that_agree_count_once(name: str) -> None:
    """Two query heads a KV head, both the same, choose what one would: groups of one are plain multi-head attention."""
    q, k, v = tensors(3, 3, 120)
    keep = conf_tree.keep(name, 50)
    one, two = (chosen(keep, [view(x, k, v)], 50) for x in (q, q.repeat_interleave(2, 0)))
    assert one == two


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_case_22_prompts_shorter_than_window_and_budget_stay_whole(name: str) -> None:
    keep = conf_tree.keep(name, 80)
    for n in (1, 2, 10, 79, 80):
        q, k, v = tensors(4, 2, n)
        assert chosen(keep, [view(q, k, v)], 80) == [[list(range(n))] * 2]


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_prompts_shorter_than_the_windows_of_scorers(name: str) -> None:
    """Twelve tokens, a budget of nine, nothing protected: every scorer ranks them, whatever its window."""
    q, k, v = tensors(4, 2, 12)
    keep = conf_tree.keep(name, 100, sinks=0, recent=0)
    found = chosen(keep, [view(q, k, v)], 9)[0]
    assert sum(map(len, found)) == (12 if name == "duo" else 18), "a retrieval head cannot keep more than everything"
    assert all(rows == sorted(set(rows)) for rows in found)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scissorhands(window=0), r"keep\.scorer\.window=0 is not possible"),
        (lambda: LagKV(lag=0), r"keep\.scorer\.lag=0"),
        (lambda: LagKV(sinks=-1), r"keep\.scorer\.sinks=-1"),
        (lambda: ChunkKV(chunk=0), r"keep\.scorer\.chunk=0"),
        (lambda: ChunkKV(window=-2), r"keep\.scorer\.window=-2"),
        (lambda: CriticalKV(epsilon=-1), r"keep\.scorer\.epsilon=-1"),
        (lambda: CriticalKV(kernel=2), r"keep\.scorer\.kernel=2"),
        (lambda: ExpectedAttention(future=0), r"keep\.scorer\.future=0"),
        (lambda: ExpectedAttention(epsilon="x"), r"keep\.scorer\.epsilon='x'"),  # type: ignore[arg-type]
    ],
)
def test_settings_are_refused_in_one_line(make: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()  # type: ignore[operator]
