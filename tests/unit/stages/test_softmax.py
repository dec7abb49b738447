"""The softmax of a layer against its definition in float64, head by head; and predicted queries in the same softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from harness.stages import softmax
from harness.stages.score.expected_attention import ExpectedAttention
from harness.stages.softmax import PLAIN, Alibi, Softmax, window_weights
from tests.support.views import tensors, view

SINKS, SLOPES = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
RULES = {
    "plain": PLAIN,
    "cap": Softmax(cap=1.5),
    "sinks": Softmax(sinks_Q=SINKS),
    "alibi": Softmax(alibi=Alibi(SLOPES, torch.float32)),
    "alibi from the newest": Softmax(alibi=Alibi(SLOPES, torch.float32, divisor=2.0, from_newest=True)),
    "window": Softmax(sees=4),
    "all": Softmax(1.5, SINKS, Alibi(SLOPES, torch.float32), 4),
}
POSITIONS = torch.tensor([[0, 3, 4, 7, 9], [1, 2, 5, 8, 9]])  # of two KV heads; queries stand at 8 and 9
QUERIES = torch.tensor([8, 9])


def defined(scores_QLN: torch.Tensor, rule: Softmax, q: int, at: int) -> list[float]:
    """Weights of one query of one head, from the definition."""
    pos, logits = POSITIONS[q // 2].tolist(), []
    for p, score in zip(pos, scores_QLN[q, at].tolist(), strict=True):
        s = score if rule.cap is None else rule.cap * math.tanh(score / rule.cap)
        if rule.alibi is not None:
            s += float(rule.alibi.slopes_Q[q]) * p / rule.alibi.divisor
        now = int(QUERIES[at])
        logits.append(-math.inf if p > now or (rule.sees is not None and p <= now - rule.sees) else s)
    total = sum(math.exp(x) for x in logits) + (0 if rule.sinks_Q is None else math.exp(float(rule.sinks_Q[q])))
    return [math.exp(x) / total for x in logits]


@pytest.mark.parametrize("name", RULES)
def test_weights_equal_the_definition(name: str) -> None:
    rule, scores = RULES[name], 2 * torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    later = POSITIONS[:, None, None, :] > QUERIES[:, None]
    beyond = rule.hidden(POSITIONS, QUERIES)
    hidden = later if beyond is None else later | beyond
    found = rule.weights(scores.clone().view(2, 2, 2, 5), POSITIONS, hidden).view(4, 2, 5)
    wanted = torch.tensor([[defined(scores, rule, q, at) for at in range(2)] for q in range(4)])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("most", [1, 1 << 19])
def test_window_weights_equal_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """All heads at once, and one by one, in each of which the rule is that of its own heads."""
    monkeypatch.setattr(softmax, "BLOCK_ELEMENTS", most)
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 2, 8, generator=g), torch.randn(2, 5, 8, generator=g)
    found = window_weights(q, k, POSITIONS, 10, 0.5, RULES[name])
    scores = q @ k.repeat_interleave(2, 0).mT * 0.5
    wanted = torch.tensor([[defined(scores, RULES[name], q, at) for at in range(2)] for q in range(4)])
    torch.testing.assert_close(found, wanted.view(2, 2, 2, 5).mean(1), atol=1e-6, rtol=1e-5)


def test_some_heads_and_several_layers_keep_their_own_numbers() -> None:
    rule = RULES["all"]
    halves = [rule.of(slice(0, 2)), rule.of(slice(2, 4))]
    joined = Softmax.join(halves)
    assert joined.sinks_Q is not None and joined.alibi is not None
    assert torch.equal(joined.sinks_Q, SINKS) and torch.equal(joined.alibi.slopes_Q, SLOPES)
    assert rule.kind == joined.kind != RULES["sinks"].kind


@pytest.mark.parametrize("name", ["sinks", "alibi"])
def test_predicted_queries_attend_in_the_layers_softmax(name: str) -> None:
    """One query direction without spread: the prediction is that query's own attention."""
    rule, (q, k, v) = RULES[name], tensors(4, 2, 12)
    plain = view(q, k, v, rope=None)
    mean = q.mean(1)
    stats = replace(plain.stats, query_mean_QD=mean, query_cov_QDD=torch.zeros(4, 16, 16), softmax=rule)
    found = ExpectedAttention().score(replace(plain, stats=stats))
    scores = (mean[:, None] @ k.repeat_interleave(2, 0).mT * 0.25).view(2, 2, 1, 12)
    weights = rule.weights(scores, plain.pos_HN, None)[..., 0, :].mean(1)
    torch.testing.assert_close(found, weights * v.norm(dim=-1), atol=1e-6, rtol=1e-5)
