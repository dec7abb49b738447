"""Hybrids: recurrent and convolution states beside stores that grow equal transformers' own, state for state, whatever is fed
beside a sequence, and are counted; with tokens evicted a hybrid equals a masked full cache."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.engine.streams import Reading, read
from harness.errors import UserError
from harness.kv.compat import STATES, forward, shape_of
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support import conf_tree, hybrids
from tests.support.hybrids import HYBRIDS, REFUSED
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache
from tests.support.tiny_models import ids

# A prompt, a chunk, single tokens, and a chunk after them; then one that is as short as the convolution.
CALLS = ((40, 9, 1, 1, 3, 1), (3, 1, 2, 1), (1, 1, 1))
# transformers builds MiniMax's mask from its first layer, which holds no tokens: a chunk after the first attends to too few. The
# masked reference below, whose masks are its own, is what its chunks are held to.
SINGLE = {"minimax": ((40, 1, 1, 1), (3, 1, 1), (1, 1, 1))}


def same_states(row: SequenceCache, expected: list[Tensor]) -> bool:
    """Whether a sequence's states are those tensors of transformers' cache, bit for bit."""
    assert row.states is not None
    found = [one for held in row.states.held for one in held]
    return len(found) == len(expected) and all(torch.equal(a, b[0]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", HYBRIDS)
@torch.inference_mode()
def test_everything_kept_equals_stock_and_holds_what_its_cache_holds(family: str) -> None:
    ours, model = hybrids.engine(family), hybrids.model(family)
    for lengths in SINGLE.get(family, CALLS):
        cache, row, seen = hybrids.stock_cache(family), ours.start(), 0
        for n in lengths:
            tokens = ids(n, seed=n + seen)
            positions = torch.arange(seen, seen + n)[None]
            expected = forward(model, torch.tensor([tokens]), positions, cache, torch.tensor([-1]))[0]
            (row,), found = ours.feed([row], [tokens])
            seen += n
            assert torch.equal(found, expected), (seen, float((found - expected).abs().max()))
            assert same_states(row, hybrids.states(cache)), seen
        states, stored = hybrids.states(cache), hybrids.stored(cache)
        held = row.bytes()
        assert held.allocated["recurrent"] == ours.shape.constant == sum(x.nbytes for x in states) > 0
        assert held.total == ours.shape.full_bytes(seen, 4) == sum(x.nbytes for x in (*states, *stored))


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("phase", ["prefill", "always"])
def test_tokens_evicted_equal_tokens_masked(family: str, phase: str) -> None:
    ours = hybrids.engine(family)
    model = hybrids.model(family, REFERENCE)
    layers = model.config.get_text_config().num_hidden_layers
    windows = hybrids.by_number(ours, [layer.window for layer in ours.shape.layers], layers)
    reference, unmasked = (MaskedCache(model, windows) for _ in range(2))
    reference.cache, unmasked.cache = hybrids.stock_cache(family), hybrids.stock_cache(family)
    context, tokens = ids(90), ids(7, seed=1)
    row = ours.compress(ours.prefill(context), Stack(keep=conf_tree.keep("knorm", 48), phase=phase))
    assert {n for layer in ours.shape.full_layers for n in row.held()[layer]} == {48}
    for one in (reference, unmasked):
        one.feed(context, None)
    away = 0.0
    for _ in range(3):
        kept = hybrids.by_number(ours, row.kept_positions(), layers)
        expected, plain = reference.feed(tokens, kept), unmasked.feed(tokens, None)
        (row,), logits = ours.feed([row], [tokens])
        scale = max(1.0, float(expected.abs().max()))
        assert float((logits[0] - expected).abs().max()) <= 2e-6 * scale
        away = max(away, float((plain - expected).abs().max()))
        tokens = [int(expected.argmax())]
    assert away > 1e-3, "masking changes nothing: the comparison has no power"


def arms(ours: Engine, *, exact: bool = True) -> list[SequenceCache]:
    """Sixteen compressed contexts: four stacks, four lengths. Where sums may differ, none that rounds or ranks what is new."""
    int8 = conf_tree.member("codec", "int8")
    stacks = [
        Stack(),
        Stack(keep=conf_tree.keep("knorm", 24)),
        Stack(keep=conf_tree.keep("sink_h2o" if exact else "streaming", 24), phase="always"),
        Stack(keys=int8, values=int8) if exact else Stack(keep=conf_tree.keep("streaming", 24)),
    ]
    needs = Needs(column_sums=True, queries=32)
    prefixes = [ours.prefill(ids(n, seed=n), needs) for n in (33, 40, 57, 64)]
    return [ours.compress(prefix, stack) for prefix in prefixes for stack in stacks]


@pytest.mark.parametrize(("family", "exact"), [*((family, False) for family in HYBRIDS), ("qwen3_next", True), ("jamba", True)])
def test_sixteen_arms_of_unequal_lengths_equal_each_alone_state_for_state(family: str, *, exact: bool) -> None:
    """Bit for bit under batch_invariant; else as near as sums of another order are."""
    ours = hybrids.engine(family, invariant=exact)
    together = arms(ours, exact=exact)
    alone = list(together)
    before = [[x.clone() for x in row.states.held] for row in together if row.states]
    feed = [ids(1 + b % 5, seed=b) for b in range(16)]
    start = list(together)
    for _ in range(3):
        together, logits = ours.feed(together, feed)
        for b, row in enumerate(alone):
            (alone[b],), single = ours.feed([row], [feed[b]])
            near(logits[b], single[0], exact=exact)
            found, expected = together[b].states, alone[b].states
            assert found is not None and expected is not None
            for x, y in zip(found.held, expected.held, strict=True):
                near(x, y, exact=exact)
                assert x.untyped_storage().nbytes() == x.nbytes, "a view would keep the states of others alive"
            assert together[b].held() == alone[b].held()
        feed = [[int(token)] for token in logits.argmax(-1)]
    for row, held in zip(start, before, strict=True):
        assert row.states is not None
        assert all(torch.equal(x, y) for x, y in zip(row.states.held, held, strict=True)), "a fork changed its start"


def near(found: Tensor, expected: Tensor, *, exact: bool) -> None:
    if exact:
        assert torch.equal(found, expected)
    else:
        assert float((found - expected).abs().max()) <= 5e-6 * max(1.0, float(expected.abs().max()))


def texts(ours: Engine) -> list[Reading]:
    """Two texts that end at different places, each under the full cache and an arm that evicts."""
    found, stack = list[Reading](), Stack(keep=conf_tree.keep("sink_h2o", 24), phase="always")
    for text in (tuple(ids(75, seed=1)), tuple(ids(58, seed=2))):
        first = len(found)
        starts = (ours.start(length=len(text)), ours.start(stack, len(text)))
        found += [Reading(ids=text, row=start, reference=first) for start in starts]
    return found


@pytest.mark.parametrize("chunk", [1, 32])
def test_streams_of_unequal_lengths_equal_each_alone(chunk: int) -> None:
    ours = hybrids.engine("qwen3_next", invariant=True)
    readings = texts(ours)
    together = read(ours, readings, chunk)
    for at in (0, 2):
        pair = read(ours, [Reading(ids=one.ids, row=one.row, reference=0) for one in readings[at : at + 2]], chunk)
        for one, alone in zip(together[at : at + 2], pair, strict=True):
            assert one.row.seen == len(readings[at].ids) - 1
            assert one.curve("nll").tolist() == alone.curve("nll").tolist()
            assert one.row.states is not None and alone.row.states is not None
            assert all(torch.equal(x, y) for x, y in zip(one.row.states.held, alone.row.states.held, strict=True))
            assert torch.allclose(one.errors, alone.errors)
        assert float(pair[1].errors[:, 0].sum()) > 0 == float(pair[0].errors[:, 0].sum())


@pytest.mark.parametrize("chunk", [1, 32])
def test_streams_in_lockstep_are_the_same_with_views_and_near_those_alone(chunk: int) -> None:
    """A chunk of one text is never fed to the states of another, though sums may differ in their order."""
    ours = hybrids.engine("bamba")
    readings = texts(ours)
    shown, plain = read(ours, readings, chunk, views=1 << 30), read(ours, readings, chunk)
    for one, other in zip(shown, plain, strict=True):
        assert one.curve("nll").tolist() == other.curve("nll").tolist()
        assert torch.equal(one.errors, other.errors)
    for at in (0, 2):
        (alone,) = read(ours, [Reading(ids=readings[at].ids, row=readings[at].row, reference=0)], chunk)
        near(torch.tensor(plain[at].curve("nll")), torch.tensor(alone.curve("nll")), exact=False)


def test_chunked_contexts_of_unequal_chunks_equal_each_alone() -> None:
    ours = hybrids.engine("bamba", invariant=True)
    keep = conf_tree.keep("sink_h2o", 24)
    caches = [ours.start(Stack(keep=keep, phase="chunked", chunk=chunk), 90) for chunk in (16, 25, 32)]
    for cache, (found, peak) in zip(caches, ours.read_chunked(ids(90), caches), strict=True):
        ((alone, alone_peak),) = ours.read_chunked(ids(90), [cache])
        assert peak == alone_peak
        assert found.states is not None and alone.states is not None
        assert all(torch.equal(x, y) for x, y in zip(found.states.held, alone.states.held, strict=True))


def test_answers_with_views_are_those_without() -> None:
    ours = hybrids.engine("lfm3")
    asks = [Ask(row=row, held=ids(1 + b % 3, seed=b), max_new=5) for b, row in enumerate(arms(ours))]
    for one, other in zip(ours.answer(asks, 1 << 30), ours.answer(asks), strict=True):
        assert one.ids == other.ids
        assert one.row.bytes().total == other.row.bytes().total


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_line(family: str) -> None:
    make, why = REFUSED[family]
    with pytest.raises(UserError, match=why) as refused:
        shape_of(make())
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(bool(STATES), reason="of versions of transformers that keep states in caches of every family's own")
@pytest.mark.parametrize("kind", ["Qwen3NextConfig", "JambaConfig", "FalconH1Config", "MiniMaxConfig"])
def test_versions_with_a_cache_for_every_family_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match="keeps its recurrent states in a cache of its own kind"):
        shape_of(getattr(transformers, kind)())
