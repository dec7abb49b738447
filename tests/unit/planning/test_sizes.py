"""Planned bytes: published figures, the difference between payload and what is held, pages, bounds."""

from __future__ import annotations

import pytest

from harness.kv.shape import LayerShape, ModelShape
from harness.planning.architecture import built, count, known, named
from harness.planning.cautions import of_stack
from harness.planning.fits import Room, Serving, longest, most_sequences
from harness.planning.gpus import GPUS, Gpu
from harness.planning.sizes import size
from harness.stages.budget import Amount
from harness.stages.codec.by_layer import ByLayer
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.kivi import Kivi
from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.heads.adakv import AdaKV
from harness.stages.keep import Keep
from harness.stages.score.h2o import H2O
from harness.stages.score.snapkv import SnapKV
from harness.stages.stack import Stack

ONE = ModelShape((LayerShape(32, 128, 128),), 32)


@pytest.mark.parametrize(("model", "nbytes"), [("llama2_7b", 524_288), ("llama2_70b", 327_680), ("deepseek_v3", 70_272)])
def test_a_token_takes_what_the_papers_say(model: str, nbytes: int) -> None:
    assert size(Stack(), named(model).shape, 1, 2).high == nbytes


def test_thirty_one_times_is_payload_only() -> None:
    """Sinks 4, recent 32 and 28 heavy tokens of 1,000 in int8: 31.25 times less payload, 29.85 with all that is stored."""
    keep = Keep(scorer=H2O(), budget=Amount(unit="tokens", value=64), sinks=4, recent=32)
    full = size(Stack(), ONE, 1000, 2)
    found = size(Stack(keep=keep, keys=Int8(), values=Int8(), phase="always"), ONE, 1000, 2)
    assert full.kinds == {"payload": 16_384_000}
    assert found.kinds["payload"] == 524_288 == 16_384_000 / 31.25
    assert {kind: found.kinds[kind] for kind in ("metadata", "positions", "state")} == {
        "metadata": 2 * 32 * 64 * 2,  # one bf16 scale for keys and one for values, per head and token
        "positions": 4 * 32 * 64,
        "state": 4 * 32 * 64,
    }
    assert found.exact
    assert found.high == 548_864


def test_pages_round_tokens_up() -> None:
    assert size(Stack(), ONE, 1000, 2, page=16).high == size(Stack(), ONE, 1008, 2).high


def test_answers_grow_a_cache_that_does_not_evict_them() -> None:
    keep = Keep(scorer=H2O(), budget=Amount(unit="tokens", value=64), recent=32)
    once, always = (Stack(keep=keep, phase=phase) for phase in ("prefill", "always"))
    grown = size(once, ONE, 1000, 2, new=100).high - size(once, ONE, 1000, 2).high
    assert grown == 100 * 32 * (2 * 128 * 2 + 4)
    assert size(always, ONE, 1000, 2, new=100).high == size(always, ONE, 1000, 2).high


def test_a_split_by_scores_is_exact_where_every_token_costs_the_same() -> None:
    """Ada-KV gives out the whole budget: the sum is known though no head's share is. Blocks make it a range."""
    keep = Keep(scorer=SnapKV(), budget=Amount(unit="fraction", value=0.25), heads=AdaKV())
    assert size(Stack(keep=keep), ONE, 1000, 2).exact
    blocks = size(Stack(keep=keep, keys=Kivi(bits=2), values=Kivi(bits=2)), ONE, 1000, 2)
    assert not blocks.exact
    assert blocks.low <= sum(blocks.kinds.values()) <= blocks.high


def test_what_fits_is_counted_beside_the_weights() -> None:
    room = Room(gpu=Gpu("one", 1_000_000_000), number=2, utilization=0.5, parameters=836_160_000)
    assert room.bytes == 163_840_000  # ten sequences of 1,000 tokens of 16,384 bytes
    serving = Serving(itemsize=2, page=1, new=0)
    assert most_sequences(room.bytes, Stack(), ONE, 1000, serving) == 10
    assert longest(room.bytes, Stack(), ONE, 10, serving, limit=4096) == 1000
    assert longest(-1, Stack(), ONE, 1, serving, limit=4096) == 0
    assert GPUS["h100_80gb"].fp8 and not GPUS["a100_80gb"].fp8


def test_a_codec_inside_another_one_is_warned_of_too() -> None:
    rooms = [Room(gpu=GPUS[name], number=1, utilization=0.9, parameters=0) for name in ("h100_80gb", "b200")]
    stack = Stack(
        keys=Hadamard(inner=MxFloat()), values=ByLayer(codecs={"fp8": Float8(), "nv": NvFloat4()}, layers=("fp8", "nv"))
    )
    slow = [line for line in of_stack(stack, ONE, rooms) if "do not compute" in line]
    assert [line.split(":")[0] for line in slow] == ["h100_80gb do not compute in MXFP4", "h100_80gb do not compute in NVFP4"]


def test_parameters_on_file_are_those_of_the_architecture() -> None:
    """Every model of conf/dimensions that the installed transformers builds quickly; experts would take minutes."""
    from omegaconf import OmegaConf

    from harness.planning.architecture import FOLDER

    assert len(known()) >= 25
    for name in known():
        found = OmegaConf.load(FOLDER / f"{name}.yaml")
        if found.parameters < 2_000_000_000:
            assert count(built(OmegaConf.to_container(found.config))) == found.parameters, name
