"""compress.rope=pre: keys are stored before RoPE and read at their original positions, whatever was evicted or encoded."""

from __future__ import annotations

import pytest
import torch

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.think import Think
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.recording import recording
from tests.support.tiny_models import FAMILIES, ids

ROTARY = [family for family in FAMILIES if family != "gpt2"]


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("keep", [None, "h2o", "snapkv"])
def test_exact_keys_before_rope_are_the_same_cache(family: str, keep: str | None) -> None:
    """Whatever stays, in one go or after every step: logits as with keys stored after RoPE, and the same tokens kept."""
    engine = tiny_models.engine(family)
    prefix = engine.prefill(ids(90), conf_tree.everything())
    chosen = None if keep is None else conf_tree.keep(keep, 60)
    for phase in ("prefill",) if keep is None or "always" not in chosen.scorer.phases else ("prefill", "always"):
        rows = [engine.compress(prefix, Stack(keep=chosen, phase=phase, rope=rope)) for rope in ("post", "pre")]
        for n in (5, 1, 1):
            rows, logits = engine.feed(rows, [ids(n, seed=n)] * 2)
            torch.testing.assert_close(logits[1], logits[0], atol=2e-5, rtol=2e-5)
        a, b = ([p.tolist() for layer in row.kept_positions() for p in layer] for row in rows)
        assert a == b
        assert rows[0].bytes() == rows[1].bytes()
        for part, other in zip(rows[0].head_groups, rows[1].head_groups, strict=True):
            assert not torch.equal(part.keys.read(torch.float32), other.keys.read(torch.float32)), "stored without rotation"


def test_chunked_reading_keeps_original_positions() -> None:
    engine = tiny_models.engine("llama")
    found = []
    for rope in ("post", "pre"):
        stack = conf_tree.stack("snapkv_chunked", "chunk=32", "keep.budget.unit=tokens", "keep.budget.value=48", f"rope={rope}")
        ((row, _),) = engine.read_chunked(ids(120), [engine.start(stack, 120)])
        found.append(engine.feed([row], [ids(3, seed=3)])[1])
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)


def test_a_codec_meets_channels_that_no_rotation_has_mixed() -> None:
    """A key channel with a constant: before RoPE its groups are exact, after it they are waves."""
    engine = tiny_models.engine("llama")
    whole = engine.prefill(ids(96))
    before = engine.compress(whole, Stack(rope="pre")).head_groups[0].keys.read(torch.float32)
    stored = engine.compress(whole, Stack(keys=IntGroups(axis="channel", residual=0), rope="pre")).head_groups[0].keys
    assert torch.equal(stored.codec.encode(before).payload["codes"], stored.chunks[0].payload["codes"])


def test_models_without_rotary_positions_refuse_it_and_so_does_what_makes_no_sense() -> None:
    engine = tiny_models.engine("gpt2")
    with pytest.raises(UserError, match=r"compress\.rope='pre' is not possible with model type 'gpt2'.*legal is rope=post"):
        engine.compress(engine.prefill(ids(20)), Stack(rope="pre"))
    with pytest.raises(
        UserError, match=r"compress\.rope='pre' is not possible: positions=cache stores keys before RoPE anyway"
    ):
        Stack(positions="cache", rope="pre")
    with pytest.raises(UserError, match=r"compress\.rope='after' is not possible: allowed are post, pre"):
        Stack(rope="after")
    with pytest.raises(UserError, match=r"compress\.keys=think compares keys with queries after RoPE"):
        Stack(keys=Think(), rope="pre")
    with pytest.raises(UserError, match=r"phase='chunked' with compress\.keys=think .* legal are phase=prefill"):
        Stack(keys=Think(), keep=conf_tree.keep("knorm", 30), phase="chunked")
    assert Stack(rope="pre").describe() == "keys before RoPE"


def test_think_scores_channels_with_the_context_s_last_queries_of_each_head_s_group() -> None:
    engine: Engine = tiny_models.engine("llama")
    with recording(engine.shape.full_layers) as recorded:
        prefix = engine.prefill(ids(100), Think().needs)
    row = engine.compress(prefix, Stack(keys=Think(recent=8)))
    for layer in engine.shape.full_layers:
        ((q, k),) = recorded[layer]
        ((part, at),) = row.slots[layer]
        got = part.keys.read(torch.float32, at)
        for h in range(k.shape[0]):
            g = q.shape[0] // k.shape[0]
            scores = q[h * g : (h + 1) * g, -32:].square().mean((0, 1)) * k[h].square().mean(0)
            stay = scores.topk(int(0.6 * k.shape[2])).indices
            wanted = torch.zeros_like(k[h]).index_copy_(1, stay, k[h][:, stay])
            wanted[-8:] = k[h][-8:]
            torch.testing.assert_close(got[h], wanted)
