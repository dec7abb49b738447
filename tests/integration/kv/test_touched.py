"""What happened to rows is measured, whatever a codec or a stack says of itself: numbers against exact ones, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.engine.requests import Question
from harness.evaluation.planned import Setup
from harness.evaluation.record_maker import RecordMaker
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.encoded import Encoded
from harness.stages.keep import Choice, Keep
from harness.stages.protocols import LayerView
from harness.stages.stack import Stack
from tasks.needle import Needle
from tests.support import conf_tree, tiny_models
from tests.support.asking import results
from tests.support.tiny_models import ids


@dataclass(frozen=True, kw_only=True)
class Same(Codec):
    """Says that it loses something and stores what it got."""

    name: str = "same"
    lossy: bool = True  # type: ignore[misc]

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"rows": x_HND}, {}, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        out_HND.copy_(e.payload["rows"])

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * d * itemsize, 0


@dataclass(frozen=True, kw_only=True)
class Wide(Same):
    """Stores the same numbers in twice the bytes."""

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"rows": x_HND.double()}, {}, int(x_HND.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Pretend(Same):
    """Rounds to 4 bits and stores the result in the cache dtype: the quality of a codec without its bytes."""

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"rows": (x_HND * 2).round() / 2}, {}, int(x_HND.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Halves(Same):
    """Loses nothing, says so, and saves half of the bytes where a cache of fp32 holds what bf16 can."""

    lossy: bool = False  # type: ignore[misc]

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded({"rows": x_HND.bfloat16()}, {}, int(x_HND.shape[1]))


class KeepsAll(Keep):
    """A rule that chooses every row."""

    def choose(self, views: Sequence[LayerView], tokens: int) -> list[Choice]:
        return [
            Choice(tuple(one.layer for one in view.layers), None, torch.arange(view.n).expand(view.pos_HN.shape[0], -1))
            for view in views
        ]


def all_rows() -> Keep:
    keep = conf_tree.keep("window", 20)
    return KeepsAll(scorer=keep.scorer, budget=keep.budget)


def measured(engine: Engine, stack: Stack) -> dict[str, Any]:
    found = results(engine, [Question(owner=None, prefix=tuple(ids(90)), stack=stack, held=(3, 4), max_new=3)])
    assert found[0].status == "ok", found[0].error
    setup = Setup(
        run_id="r", model="m", identity={}, memory_limit=1, attn="a", kv_dtype="float32", shape=engine.shape, progress=False
    )
    return RecordMaker(Needle(), setup).measured(found[0])


@pytest.mark.parametrize("codec", [Same(), Wide()])
@pytest.mark.parametrize("sides", [("keys",), ("values",), ("keys", "values")])
def test_a_codec_that_changes_nothing_and_saves_nothing_did_nothing(codec: Codec, sides: tuple[str, ...]) -> None:
    found = measured(tiny_models.engine("llama"), Stack(**dict.fromkeys(sides, codec)))  # type: ignore[arg-type]
    assert (found["status"], found["entries_touched"], found["storage"]) == ("not_exercised", 0, "packed")


def test_a_rule_that_evicts_nothing_did_nothing() -> None:
    found = measured(tiny_models.engine("llama"), Stack(keep=all_rows()))
    assert (found["status"], found["entries_touched"]) == ("not_exercised", 0)


@pytest.mark.parametrize("stack", [Stack(keys=Pretend()), Stack(keys=Int8(), values=Pretend())])
def test_numbers_that_changed_without_a_byte_saved_are_simulated(stack: Stack) -> None:
    found = measured(tiny_models.engine("llama"), stack)
    assert (found["status"], found["storage"], found["entries_touched"]) == ("ok", "simulated", 3 * 2 * 90)


def test_bytes_saved_without_loss_count() -> None:
    """A codec without loss is a transform like any other: no short cut leaves it out, and no label calls it full."""
    engine, stack = tiny_models.engine("llama"), Stack(keys=Halves(), values=Halves())
    assert stack.describe() == "same"
    prefix = engine.prefill(ids(90))
    parts = [replace(p, keys=rounded(p.keys), values=rounded(p.values)) for p in prefix.row.head_groups]
    row = replace(prefix, row=replace(prefix.row, head_groups=tuple(parts)))
    packed = engine.compress(row, stack)
    assert packed.bytes().total * 2 == row.row.bytes().total
    assert (packed.touched(), packed.storage) == (3 * 2 * 90, "packed")
    for a, b in zip(packed.head_groups, row.row.head_groups, strict=True):
        assert torch.equal(a.keys.read(torch.float32), b.keys.read(torch.float32))


def rounded(side: Any) -> Any:
    return type(side).of(side.exact().bfloat16().float(), Exact(), None)


@pytest.mark.parametrize("name", [n for n in conf_tree.members("codec") if n != "exact"])
def test_every_codec_of_the_project_is_found_to_change_numbers_and_save_bytes(name: str) -> None:
    """In a bf16 cache of 90 rows and two more: rows that wait exact for one another do not count, all others do."""
    codec = conf_tree.member("codec", name)
    engine = Engine(tiny_models.tiny("llama"), torch.bfloat16)
    stack = Stack(keys=codec, values=codec)
    row = engine.compress(engine.prefill(ids(290), stack.needs), stack)
    encoded = lossily(row)
    assert (row.touched(), row.storage) == (3 * 2 * encoded, "packed")
    assert encoded
    (row,), _ = engine.feed([row], [ids(200)])
    encoded = lossily(row)
    assert (row.touched(), row.storage) == (3 * 2 * encoded, "packed")


def lossily(row: Any) -> int:
    """Tokens of the first head group on the side that encoded more; a codec for keys alone leaves values exact."""
    sides = (row.head_groups[0].keys, row.head_groups[0].values)
    return max(side.n_encoded for side in sides if side.codec.lossy)


def test_looking_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are decoded one at a time up to the first change, and never again: one head a side for a codec that loses."""
    engine, heads = tiny_models.engine("llama"), []
    prefix = engine.prefill(ids(90))
    monkeypatch.setattr(Int8, "decode", lambda self, e, out: (heads.append(len(out)), out.zero_(), None)[-1])
    row = engine.compress(prefix, Stack(keys=Int8(), values=Int8()))
    assert heads == [1, 1]
    row.head_groups[0].append(replace_kv(row), None)
    assert heads == [1, 1]


def replace_kv(row: Any) -> Any:
    from harness.types import KV

    x = torch.randn(row.head_groups[0].heads.n, 1, 32)
    return KV(x, x, 90)
