"""In a stream, arms that have lost nothing so far share one forward: fewer rows are computed, and every number is the same."""

from __future__ import annotations

import pytest

from harness.engine import streams
from harness.engine.engine import Engine
from harness.engine.streams import Read, Reading, read
from tests.support import conf_tree, tiny_models

NAMES = ("full", "int8", "int4", "kivi2", "streaming", "h2o", "tova", "sink_h2o_int8", "streaming_cache", "window")
ALL = 1 << 34


class Counting(Engine):
    """An engine that counts the tokens it computes."""

    computed = 0

    def _feed(self, run, caches, ids, *, every=False, invariant):  # type: ignore[no-untyped-def]
        self.computed += sum(map(len, ids))
        return super()._feed(run, caches, ids, every=every, invariant=invariant)


def waves(chunk: int, views: int) -> tuple[list[Read], int]:
    """Two texts of different lengths under every stack, in one wave; and how many tokens were computed."""
    plain = tiny_models.engine("llama")
    engine = Counting(plain.model, plain.kv_dtype, invariant=True)
    engine.computed = 0  # an engine tries itself when it is made
    texts = [tuple(tiny_models.ids(n, seed=n)) for n in (90, 61)]
    readings = [
        Reading(ids=text, row=engine.start(conf_tree.stack(name), len(text)), reference=d * len(NAMES))
        for d, text in enumerate(texts)
        for name in NAMES
    ]
    return read(engine, readings, chunk, views), engine.computed


@pytest.mark.parametrize(("chunk", "views"), [(1, ALL), (7, 0), (32, ALL)])
def test_sharing_changes_no_number(chunk: int, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, fewer = waves(chunk, views)
    monkeypatch.setattr(streams, "_leaders", lambda readings, rows, going: dict(zip(going, going, strict=True)))
    apart, computed = waves(chunk, views)
    assert fewer < computed == len(NAMES) * (89 + 60)
    for a, b in zip(shared, apart, strict=True):
        assert all((a.curve(c) == b.curve(c)).all() for c in ("nll", "kl", "agree"))
        assert (a.peak, a.byte_tokens, a.compressed, a.most, a.row.bytes()) == (
            b.peak,
            b.byte_tokens,
            b.compressed,
            b.most,
            b.row.bytes(),
        )
        assert a.errors.equal(b.errors) and (a.sound, a.reference_sound) == (b.sound, b.reference_sound)
        for x, y in zip(a.row.head_groups, b.row.head_groups, strict=True):
            assert all(s.equal(t) for (_, s), (_, t) in zip(x.tensors(), y.tensors(), strict=True))
