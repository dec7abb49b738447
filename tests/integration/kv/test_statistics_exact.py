"""Column sums equal their O(T^2) definition, in blocks, with past rows, in every family; recording changes no output bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.kv import attention_stats as statistics
from harness.kv.attention_stats import column_sums
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.oracles import keep as oracle
from tests.support.recording import recording
from tests.support.tiny_models import FAMILIES, ids, tiny

EVERYTHING = Needs(column_sums=True, queries=8)


def defined(q_QLD: Tensor, k_HND: Tensor, scaling: float) -> Tensor:
    """The whole N x N matrix in float64: softmax row by row, summed over queries, mean over the group."""
    (n_q, new, _), (h, n, _) = q_QLD.shape, k_HND.shape
    logits = q_QLD.double() @ k_HND.double().repeat_interleave(n_q // h, 0).mT * scaling
    hidden = torch.ones(new, n, dtype=torch.bool).triu(n - new + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(1).view(h, n_q // h, n).mean(1)


@pytest.mark.parametrize(("n_q", "h"), [(4, 4), (4, 2), (4, 1), (9, 3)])
@pytest.mark.parametrize(("new", "past"), [(50, 0), (1, 0), (1, 40), (7, 33), (50, 3)])
@pytest.mark.parametrize("block", [1, 700, 1 << 20])
def test_column_sums_equal_the_definition(
    monkeypatch: pytest.MonkeyPatch, n_q: int, h: int, new: int, past: int, block: int
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_ELEMENTS", block)
    g = torch.Generator().manual_seed(0)
    q, k = 3 * torch.randn(n_q, new, 16, generator=g), torch.randn(h, past + new, 16, generator=g)
    found = column_sums(q, k, 0.3)
    assert found.shape == (h, past + new)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), defined(q, k, 0.3), atol=2e-6 * new, rtol=2e-6)
    assert float(found.sum()) == pytest.approx(h * new, rel=1e-5)


@pytest.mark.parametrize("block", [3000, 1 << 20])
@pytest.mark.parametrize("oned", [True, False])
def test_heads_one_by_one_equal_the_definition(monkeypatch: pytest.MonkeyPatch, block: int, oned: bool) -> None:
    """With oneDNN's products and without; queries and keys lie as a model's projections have them, token by token."""
    monkeypatch.setattr(statistics, "OWN_PRODUCT", 0)
    monkeypatch.setattr(statistics, "BLOCK_ELEMENTS", block)
    if not oned:
        monkeypatch.setattr(statistics, "has_linear", lambda x: False)
    g = torch.Generator().manual_seed(0)
    q, k = 3 * torch.randn(150, 6, 16, generator=g).transpose(0, 1), torch.randn(170, 2, 16, generator=g).transpose(0, 1)
    found = column_sums(q, k, 0.3)
    torch.testing.assert_close(found.double(), defined(q, k, 0.3), atol=3e-4, rtol=2e-6)


def test_column_sums_equal_the_slow_oracle() -> None:
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(4, 20, 16, generator=g), torch.randn(2, 20, 16, generator=g)
    torch.testing.assert_close(column_sums(q, k, 0.25), torch.tensor(oracle.h2o_scores(q, k)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_fp32(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(4, 300, 16, generator=g).to(dtype), torch.randn(2, 300, 16, generator=g).to(dtype)
    torch.testing.assert_close(column_sums(q, k, 0.25).double(), defined(q, k, 0.25), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_prefill_sums_equal_stock_attention_weights(family: str) -> None:
    """Against the weights that transformers' own eager attention returns."""
    tokens = ids(60)
    engine = tiny_models.engine(family)
    prefix = engine.prefill(tokens, EVERYTHING)
    weights = tiny(family, "eager")(torch.tensor([tokens]), output_attentions=True).attentions
    assert len(weights) == len(engine.shape.layers)
    for layer, stats, w in zip(engine.shape.layers, prefix.stats, weights, strict=True):
        if layer.window is not None:
            assert stats.column_sums_HN is None  # a sliding layer is not compressed
            continue
        wanted = w[0].sum(1).view(layer.heads, -1, len(tokens)).mean(1)
        torch.testing.assert_close(stats.column_sums_HN, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_recording_changes_no_output_bit(family: str) -> None:
    engine = tiny_models.engine(family)
    plain, recorded = (engine.prefill(ids(60), needs) for needs in (Needs(), EVERYTHING))
    for a, b in zip(plain.row.head_groups, recorded.row.head_groups, strict=True):
        for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x, y)
    (_, x), (_, y) = (engine.feed([p.row], [ids(5, seed=1)]) for p in (plain, recorded))
    assert torch.equal(x, y)
    assert all(s.column_sums_HN is None and s.queries_QWD is None for s in plain.stats)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_query_moments_are_those_of_the_queries_before_their_rotation(family: str) -> None:
    engine = tiny_models.engine(family)
    with recording(engine.shape.full_layers) as recorded:
        prefix = engine.prefill(ids(60), Needs(query_moments=True))
    for layer in engine.shape.full_layers:
        ((q, _),), rope = recorded[layer], engine.ropes[layer]
        plain = (q if rope is None else rope.unrotate(q, torch.arange(60))).double()
        stats = prefix.stats[layer]
        assert stats.query_mean_QD is not None and stats.query_cov_QDD is not None
        torch.testing.assert_close(stats.query_mean_QD.double(), plain.mean(1), atol=1e-5, rtol=1e-5)
        wanted = torch.stack([one.T.cov(correction=0) for one in plain])
        torch.testing.assert_close(stats.query_cov_QDD.double(), wanted, atol=1e-5, rtol=1e-5)


def test_only_what_is_asked_for_is_recorded() -> None:
    engine = tiny_models.engine("llama")
    sums = engine.prefill(ids(30), Needs(column_sums=True)).stats[0]
    queries = engine.prefill(ids(30), Needs(queries=5)).stats[0]
    assert sums.queries_QWD is None
    assert queries.column_sums_HN is None
    assert queries.queries_QWD is not None
    assert queries.queries_QWD.shape == (4, 5, 32)
    assert queries.queries_QWD.untyped_storage().nbytes() == 4 * 5 * 32 * 4


def test_case_17_prompt_logits_do_not_depend_on_what_is_evicted_afterwards() -> None:
    """TINY-A: compression acts after the prompt's own attention; the exact prefix is the same with and without it."""
    engine = Engine(tiny_models.build(tiny_models.tiny_a(), "kv_harness"), torch.float32)
    prefix = engine.prefill(ids(200), EVERYTHING)
    before = [t.clone() for part in prefix.row.head_groups for _, t in part.tensors()]
    engine.compress(prefix, Stack(keep=conf_tree.keep("sink_h2o", 32), phase="always"))
    after = [t for part in prefix.row.head_groups for _, t in part.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    again = engine.prefill(ids(200), Needs())
    assert torch.equal(again.row.head_groups[0].keys.read(torch.float32), before[0])
