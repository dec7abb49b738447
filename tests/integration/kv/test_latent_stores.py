"""What is done to latents that are stored: positions, codecs, cache dtypes, batches, forks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from harness.engine.engine import Engine
from harness.engine.requests import Question
from harness.errors import UserError
from harness.kv.compat import forward
from harness.kv.memory import predict
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.asking import owned
from tests.support.latent_models import D_C, D_R, FAMILIES
from tests.support.tiny_models import build, ids

ONE = "deepseek_v3"
DENSE = "youtu"  # products of experts depend on what else is routed to them
ROTATIONS = {"deepseek_v3", "deepseek_v2", "deepseek_v3, halves", "deepseek_v3, yarn", "longcat_flash", "minicpm3"}


def one_layer(name: str) -> PretrainedConfig:
    config = FAMILIES[name]()
    config.num_hidden_layers = 2 if name == "longcat_flash" else 1  # its blocks attend twice, each time into another layer
    return config


@lru_cache(maxsize=2)
def engine(name: str, *, invariant: bool = False) -> Engine:
    return Engine(build(FAMILIES[name](), "kv_harness"), torch.float32, invariant=invariant)


# --- positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ROTATIONS & set(FAMILIES)))
def test_the_rotated_part_can_be_turned_back(name: str) -> None:
    ours, tokens = engine(name), ids(50)
    row, at = ours.prefill(tokens).row, torch.arange(50)
    for layer, rope in enumerate(ours.ropes):
        ((part, where),) = row.slots[layer]
        k = part.keys.exact()[where]
        assert rope is not None and k.shape == (1, 50, D_R)
        plain = rope.unrotate(k, at)
        torch.testing.assert_close(rope.rotate(plain, at), k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rope.range(plain[:, 7:], 7), k[:, 7:], atol=1e-5, rtol=1e-5)
        assert float((plain[:, 9] - k[:, 9]).abs().max()) > 1e-2
    ((part, where),) = engine(name).prefill([tokens[9]] * 9).row.slots[0]
    same = engine(name).ropes[0].unrotate(part.keys.exact()[where], torch.arange(9))  # type: ignore[union-attr]
    torch.testing.assert_close(same, same[:, :1].expand_as(same), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize(("positions", "sinks"), [("original", 0), ("cache", 4)])
def test_decoding_after_eviction_equals_a_fresh_run_on_what_was_kept(name: str, positions: str, sinks: int) -> None:
    """One layer: a latent depends on its own token only; where the tokens left close ranks, so do their rotated parts."""
    ours, tokens = Engine(build(one_layer(name), "kv_harness"), torch.float32), ids(120)
    keep = conf_tree.keep("streaming" if sinks else "window", 64)
    row = ours.compress(ours.prefill(tokens), Stack(keep=keep, positions=positions))
    kept = tokens[:sinks] + tokens[120 - 64 + sinks :]
    for token in ids(3, seed=9):
        (row,), logits = ours.feed([row], [[token]])
        kept.append(token)
        _, fresh = ours.feed([ours.start()], [kept])
        torch.testing.assert_close(logits, fresh, atol=2e-5, rtol=1e-5)


# --- codecs and bytes --------------------------------------------------------------------------------------------


OF_QUERIES = {"think", "think_int8"}  # they compare keys with queries, which latents do not meet


@pytest.mark.parametrize("name", sorted(OF_QUERIES))
def test_codecs_that_look_at_queries_are_refused(name: str) -> None:
    ours = engine(ONE)
    with pytest.raises(UserError, match="is not possible"):
        stack = Stack(keys=conf_tree.member("codec", name))
        ours.check(stack)
        ours.compress(ours.prefill(ids(200), stack.needs), stack)


@pytest.mark.parametrize("name", [name for name in conf_tree.members("codec") if name not in OF_QUERIES])
def test_every_codec_stores_latents_in_the_bytes_of_its_formula(name: str) -> None:
    ours, codec = engine(ONE), conf_tree.member("codec", name)
    stack = Stack(keys=codec, values=codec)
    row = ours.compress(ours.prefill(ids(200)), stack)
    held = row.bytes()
    constants = sum(
        t.numel() * t.element_size()
        for part in row.head_groups
        for side in (part.keys, part.values)
        for t in {id(t): t for chunk in side.chunks for t in chunk.shared.values()}.values()
    )
    assert held.total - constants <= predict(stack, ours.shape, 200, 4, 200) or constants == 0
    if not constants:
        assert held.total == predict(stack, ours.shape, 200, 4, 200)
    info = row.codec_info()
    assert info["keys"]["holds"].startswith("rotated part") and info["values"]["holds"].startswith("latent")
    (grown,), logits = ours.feed([row], [ids(3, seed=2)])
    assert bool(torch.isfinite(logits).all()) and grown.seen == 203
    if name.startswith(("int8", "hadamard_int8")):
        _, exact = ours.feed([ours.prefill(ids(200)).row], [ids(3, seed=2)])
        assert float((logits - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_evicted_and_quantized_bytes_are_the_formula_s() -> None:
    ours = engine(ONE)
    stack = conf_tree.stack("sink_h2o_int8", "keep.budget.unit=tokens", "keep.budget.value=64")
    row = ours.compress(ours.prefill(ids(200), stack.needs), stack)
    assert row.held() == [[64]] * 3
    positions, state = 4 * 64 * 3, (4 * 64 * 3 if stack.keeps_state else 0)
    codes, scales = 64 * 3 * (D_C + D_R), 64 * 3 * 2 * 4
    assert row.bytes().total == predict(stack, ours.shape, 64, 4, 200) == codes + scales + positions + state


def test_group_sizes_are_checked_against_both_parts() -> None:
    codec = conf_tree.member("codec", "int4_token")
    codec.check(D_C)
    codec.check(D_R)
    with pytest.raises(UserError, match="it must divide"):
        codec.check(D_R // 2)


class Rounding(DynamicCache):
    """A stock cache that rounds what it is given."""

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(k.bfloat16().float(), v.bfloat16().float(), *args, **kwargs)


def test_latents_are_rounded_once_on_entry() -> None:
    """Also for the forward they come from: as a stock cache of latents that rounds what it is handed."""
    model = build(FAMILIES[ONE](), "sdpa")
    ours, cache = Engine(build(FAMILIES[ONE](), "kv_harness"), torch.bfloat16), Rounding(config=model.config)
    row, seen = ours.start(), 0
    for n in (40, 1, 5):
        with torch.inference_mode():
            at = torch.arange(seen, seen + n)[None]
            expected = forward(model, torch.tensor([ids(n, seed=n)]), at, cache, torch.tensor([-1]))[0]
        if cache.layers[0].keys.shape[1] > 1:
            pytest.skip("this version of transformers caches expanded keys and values")
        (row,), found = ours.feed([row], [ids(n, seed=n)])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        seen += n
    assert row.bytes().total == seen * 3 * (D_C + D_R) * 2


@pytest.mark.parametrize("stack", ["full", "sink_h2o_int8"])
def test_no_token_is_expanded_twice_in_a_forward(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a token goes through a layer's up-projection once a forward, as in stock; of 5.2 new ones do so twice."""
    ours = engine(ONE)
    if not all(latent is not None and latent.handed for latent in ours.latents):
        pytest.skip("this version of transformers hands its cache keys and values")
    prefix = ours.prefill(ids(60), conf_tree.everything())
    row = ours.compress(prefix, conf_tree.stack(stack, *(["keep.budget.value=0.75"] if stack != "full" else [])))
    stored, expanded = row.size // len(ours.shape.layers), list[int]()
    for latent in ours.latents:
        assert latent is not None
        up = latent.up.forward
        monkeypatch.setattr(latent.up, "forward", lambda x, up=up: expanded.append(x.shape[-2]) or up(x))
    ours.feed([row], [ids(3)])
    assert expanded == [stored + 3] * len(ours.latents)


# --- company -----------------------------------------------------------------------------------------------------


def stacks() -> list[Stack]:
    half = ["keep.budget.value=0.5"]
    names = ("full", "h2o", "snapkv", "sink_h2o_int8", "int4", "streaming_cache")
    return [conf_tree.stack(name, *(half if conf_tree.stack(name).keep else [])) for name in names]


def questions(every: list[Stack]) -> list[Question[int]]:
    return [Question(owner=i, prefix=tuple(ids(150)), held=(5, 6), stack=s, max_new=6, seed=5) for i, s in enumerate(every)]


@pytest.mark.parametrize("invariant", [False, True])
def test_in_lockstep_equals_alone(invariant: bool) -> None:
    ours = engine(DENSE, invariant=invariant)
    asked = questions([*stacks(), *stacks()])  # the same stacks twice: a second question on the same context
    together = owned(ours, asked)
    for one in asked:
        alone, fused = owned(ours, [one])[one.owner], together[one.owner]
        assert alone.status == fused.status == "ok", alone.error
        assert alone.answer is not None and fused.answer is not None
        assert alone.answer.ids == fused.answer.ids
        assert alone.answer.row.held() == fused.answer.row.held()
        for a, b in zip(alone.answer.row.head_groups, fused.answer.row.head_groups, strict=True):
            for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
                if invariant:
                    assert torch.equal(x, y)
                elif x.is_floating_point():
                    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["evicted after every step", "evicted once", "kept"])
def test_decoded_views_change_no_bit(kind: str) -> None:
    """Keys and values differ in width; every team here has views (what is turned whenever it is read would have none)."""
    names = {"evicted after every step": ("h2o", "sink_h2o_int8"), "evicted once": ("snapkv",), "kept": ("full", "int4")}[kind]
    half = ["keep.budget.value=0.5"]
    asked = [conf_tree.stack(name, *(half if conf_tree.stack(name).keep else [])) for name in names]
    ours = engine(ONE)
    prefix = ours.prefill(ids(150), conf_tree.everything())
    found: dict[int, list[Tensor]] = {}
    for views in (0, 1 << 28):
        batch, live = ours.batch(views), [ours.compress(prefix, stack, seed=1) for stack in asked]
        found[views] = []
        for step in range(5):
            order = batch.form(list(range(len(live))), live, [1] * len(live))
            assert all((team.views is not None) == (views > 0) for team in batch.teams)
            got = ours.read([live[i] for i in order], [[7 + step]] * len(order), batch=batch)
            for b, i in enumerate(order):
                live[i] = got.rows[b]
            found[views].append(got.logits_BLV[torch.tensor(order).argsort()])
    for a, b in zip(found[0], found[1 << 28], strict=True):
        assert torch.equal(a, b)
