"""Decoded views change no bit and stay in their bytes; in tiles, a request's logits are the same bits in any company."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Answer, Ask, Engine
from harness.engine.streams import Read, Reading, read
from harness.errors import UserError
from harness.kv.sequence_cache import SequenceCache
from harness.kv.teams import ROOM
from harness.stages.encoded import Heads
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids

EVERYTHING = conf_tree.everything()
CONTEXTS = (150, 97, 150)
NEW = 40  # more than any codec's group: tails are flushed and views grow
ALL = 1 << 34


@lru_cache
def rows(family: str) -> list[tuple[str, SequenceCache]]:
    """A row for every member of conf/compress that the family allows, over contexts of two lengths.

    Llama reads all contexts under each; another family differs in positions and windows alone, so there each reads one of them.
    """
    engine, found = tiny_models.engine(family), []
    prefixes = [engine.prefill(ids(n, seed=e), EVERYTHING) for e, n in enumerate(CONTEXTS)]
    for number, name in enumerate(conf_tree.members("compress")):
        for e, prefix in enumerate(prefixes):
            if family != "llama" and e != number % len(CONTEXTS):
                continue
            try:
                found.append((name, engine.compress(prefix, conf_tree.stack(name), seed=e)))
            except UserError:
                continue
    return found


class Recording(Engine):
    """An engine that keeps the logits of every forward, by the tokens fed and the positions they were fed at."""

    def answered(self, asks: list[Ask], views: int) -> tuple[list[Answer], list[Tensor], int]:
        """Answers, the logits of every step (rows in the order of their numbers) and the most bytes that views held."""
        logits, most = [], 0
        made, inner = self.batch, self._forward

        def forward(*args: object, **kwargs: object) -> object:
            nonlocal most
            out = inner(*args, **kwargs)  # type: ignore[arg-type]
            batch = kwargs["batch"]
            order = [i for team in batch.teams for i in team.members]  # type: ignore[attr-defined]
            logits.append(out[2][sorted(range(len(order)), key=order.__getitem__)])
            most = max(most, batch.nbytes)  # type: ignore[attr-defined]
            return out

        self._forward = forward  # type: ignore[method-assign, assignment]
        try:
            return self.answer(asks, views), logits, most
        finally:
            self._forward, self.batch = inner, made  # type: ignore[method-assign]


def recording(family: str) -> Recording:
    """An engine as runs have it by default: views may change the teams, and so what is attended in one call."""
    engine = tiny_models.engine(family)
    return Recording(engine.model, engine.kv_dtype, invariant=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mistral"])
def test_views_change_no_bit(family: str) -> None:
    engine = recording(family)
    asks = [Ask(row=row, held=ids(9, seed=3), max_new=NEW - i % 5) for i, (_, row) in enumerate(rows(family))]
    off, without, none = engine.answered(asks, 0)
    auto, with_views, most = engine.answered(asks, ALL)
    assert none == 0 and most > 0
    assert len(without) == len(with_views) == NEW
    assert all(torch.equal(a, b) for a, b in zip(without, with_views, strict=True))
    for (name, _), a, b in zip(rows(family), off, auto, strict=True):
        assert a.ids == b.ids, name
        assert (a.peak, a.row.bytes()) == (b.peak, b.row.bytes()), name
        kept = ([p.tolist() for layer in one.row.kept_positions() for p in layer] for one in (a, b))
        assert next(kept) == next(kept), name


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_window_slides_through_its_room_and_back_to_the_front_without_a_changed_bit(family: str) -> None:
    engine = recording(family)
    prefixes = [engine.prefill(ids(n, seed=n), EVERYTHING) for n in (5, 97)]  # one starts inside the window
    rows = [engine.compress(prefix, conf_tree.stack(n)) for prefix in prefixes for n in ("full", "h2o", "int4")]
    asks = [Ask(row=row, held=ids(3, seed=1), max_new=2 * ROOM + 10) for row in rows]
    off, without, _ = engine.answered(asks, 0)
    auto, with_views, most = engine.answered(asks, ALL)
    assert most > 0 and all(torch.equal(a, b) for a, b in zip(without, with_views, strict=True))
    assert [a.row.bytes() for a in off] == [b.row.bytes() for b in auto]


def test_questions_of_different_lengths_change_no_bit() -> None:
    engine = recording("llama")
    asks = [Ask(row=row, held=ids(3 + i % 7, seed=3), max_new=12) for i, (_, row) in enumerate(rows("llama"))]
    _, without, _ = engine.answered(asks, 0)
    _, with_views, most = engine.answered(asks, ALL)
    assert most > 0 and all(torch.equal(a, b) for a, b in zip(without, with_views, strict=True))


@lru_cache(maxsize=1)
def without_views() -> tuple[Recording, list[Ask], list[Tensor]]:
    """(engine, what is asked, the logits of every step)."""
    engine = recording("llama")
    asks = [Ask(row=row, held=ids(9, seed=3), max_new=6) for _, row in rows("llama")]
    return engine, asks, engine.answered(asks, 0)[1]


@pytest.mark.parametrize("room", [1 << 16, 1 << 19, 1 << 21])
def test_views_stay_in_their_bytes(room: int) -> None:
    engine, asks, without = without_views()
    _, limited, most = engine.answered(asks, room)
    assert most <= room
    assert all(torch.equal(a, b) for a, b in zip(without, limited, strict=True))


@pytest.mark.parametrize(("family", "chunk"), [("llama", 1), ("llama", 5), ("gemma3", 5)])
def test_streams_with_views_give_the_same_curves(family: str, chunk: int) -> None:
    """To the bit where answers do not depend on company: with views other sequences attend in one call."""
    plain = tiny_models.engine(family)
    engine = Engine(plain.model, plain.kv_dtype, invariant=True)
    names = ["full", "int8", "int4", "kivi2", "streaming", "h2o", "sink_h2o_int8", "streaming_cache", "window"]

    def wave(views: int) -> list[Read]:
        text = tuple(ids(90, seed=2))
        readings = [Reading(ids=text, row=engine.start(conf_tree.stack(n), len(text)), reference=0) for n in names]
        return read(engine, readings, chunk, views)

    for name, a, b in zip(names, wave(0), wave(ALL), strict=True):
        assert all((a.curve(c) == b.curve(c)).all() for c in ("nll", "kl", "agree")), name
        assert (a.peak, a.byte_tokens, a.row.bytes()) == (b.peak, b.byte_tokens, b.row.bytes()), name


@pytest.mark.parametrize("chunk", [9, 32])
def test_sequences_that_part_have_views_of_their_own(chunk: int) -> None:
    """Alike until the smaller budget is full, or until one text's last chunk is shorter: none copies into what another reads."""
    engine, texts = tiny_models.engine("llama"), (tuple(ids(150, seed=1)), tuple(ids(107, seed=2)))
    stacks = [Stack(), *(Stack(keep=conf_tree.keep("sink_h2o", budget), phase="always") for budget in (24, 40, 70))]

    def wave(views: int) -> list[Read]:
        starts = [(e, text, engine.start(stack, len(text))) for e, text in enumerate(texts) for stack in stacks]
        readings = [Reading(ids=text, row=row, reference=e * len(stacks)) for e, text, row in starts]
        return read(engine, readings, chunk, views)

    for a, b in zip(wave(0), wave(ALL), strict=True):
        assert all((a.curve(c) == b.curve(c)).all() for c in ("nll", "kl", "agree"))
        assert torch.equal(a.errors, b.errors)


@pytest.mark.parametrize("name", conf_tree.members("codec"))
def test_a_codec_by_tokens_decodes_some_of_its_rows_to_the_same_bits(name: str) -> None:
    x = torch.randn(6, 256, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for role in ("keys", "values"):
        codec = conf_tree.member("codec", name).for_role(role)
        if not codec.by_tokens or codec.calibration is not None:
            continue
        codec = codec.fit(x, Heads((0, 1, 2), 0, 2))
        n = 256 // codec.flush * codec.flush
        e = codec.encode(x[:, :n].contiguous())
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.empty(6, n, 64, dtype=dtype)
            codec.decode(e, whole)
            for some in {codec.flush, n}:
                part = torch.empty(6, some, 64, dtype=dtype)
                codec.decode(e.newest(some), part)
                assert torch.equal(part, whole[:, n - some :])
            heads = torch.empty(2, n, 64, dtype=dtype)
            codec.decode(e.heads(2, 4), heads)
            assert torch.equal(heads, whole[2:4])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_logits_do_not_depend_on_company(family: str) -> None:
    plain = tiny_models.engine(family)
    engine = Engine(plain.model, plain.kv_dtype, invariant=True)
    work = [(row, ids(9 - 3 * (i % 2), seed=3 + i % 3)) for i, (_, row) in enumerate(rows(family))]

    def logits(wave: list[int]) -> dict[int, Tensor]:
        held, feed, found = [work[i][0] for i in wave], [work[i][1] for i in wave], []
        for step in range(5):
            held, out = engine.feed(held, feed)
            found.append(out)
            feed = [[(7 * step + 5) % 50]] * len(wave)
        return {i: torch.stack([out[b] for out in found]) for b, i in enumerate(wave)}

    alone = {i: one for k in range(len(work)) for i, one in logits([k]).items()}
    generator = random.Random(0)
    for size in (3, 16, 48):
        order = generator.sample(range(len(work)), len(work))
        for at in range(0, len(order), size):
            for i, one in logits(order[at : at + size]).items():
                assert torch.equal(one, alone[i]), (size, rows(family)[i][0])


def test_chunks_read_in_company_leave_the_same_rows() -> None:
    plain = tiny_models.engine("llama")
    engine = Engine(plain.model, plain.kv_dtype, invariant=True)
    text = ids(200, seed=4)

    def start(name: str) -> SequenceCache:
        return engine.start(conf_tree.stack(name, "chunk=32"), len(text))

    names = ["snapkv_chunked", "h2o_chunked"]
    together = engine.read_chunked(text, [start(name) for name in names])
    for name, (row, peak) in zip(names, together, strict=True):
        ((single, most),) = engine.read_chunked(text, [start(name)])
        assert peak == most
        for a, b in zip(row.head_groups, single.head_groups, strict=True):
            assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))
