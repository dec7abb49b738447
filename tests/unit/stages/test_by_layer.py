"""Bits by layer: lists and rules choose as they say, a mean of bits is met and never exceeded, mistakes are refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from harness.configure.typed import build
from harness.errors import UserError
from harness.stages.codec.by_layer import ByLayer, codecs_of, of_layer
from harness.stages.codec.int_groups import IntGroups
from harness.stages.limits import Limits
from harness.stages.stack import Stack
from tests.support import conf_tree


def by_layer(**settings: Any) -> ByLayer:
    codecs = {f"int{bits}": IntGroups(name=f"int{bits}", bits=bits) for bits in (2, 4, 8)}
    return ByLayer(**{"name": "mixed", "codecs": codecs, "layers": "first", "mean_bits": 3, **settings})


def test_a_list_names_the_codec_of_each_layer() -> None:
    one = by_layer(layers=["int4", "int8", "int2", "int4"], mean_bits=None)
    assert one.chosen([0, 2, 3, 7]) == ("int4", "int8", "int2", "int4")
    assert of_layer(one, 3, [0, 2, 3, 7]) is one.codecs["int2"], "layers in between are not compressed"
    with pytest.raises(UserError, match="a codec for each of the 3 that are compressed"):
        one.chosen([0, 1, 2])


@pytest.mark.parametrize("layers", [1, 4, 7, 30])
@pytest.mark.parametrize("mean", [2, 2.5, 3, 3.1, 4, 5.9, 8])
def test_a_mean_is_met_as_nearly_as_whole_layers_allow(layers: int, mean: float) -> None:
    one = by_layer(mean_bits=mean)
    bits = [one.codecs[name].info()["bits"] for name in one.chosen(range(layers))]
    assert bits == sorted(bits, reverse=True), "the first layers get more"
    assert len(set(bits)) <= 2
    low, high = (one.codecs[name].info()["bits"] for name in one.between)
    total, asked = sum(int(str(b)) for b in bits), Fraction(str(mean)) * layers
    assert total <= asked < total + max(1, int(str(high)) - int(str(low)))


def test_rules_say_which_layers_get_more() -> None:
    layers = range(4)
    assert by_layer().chosen(layers) == ("int4", "int4", "int2", "int2")
    assert by_layer(layers="last").chosen(layers) == ("int2", "int2", "int4", "int4")
    calibration = conf_tree.member("codec", "int8_static").calibration
    waiting = by_layer(layers="sensitive", calibration=calibration)
    with pytest.raises(UserError, match="has no calibration table"):
        waiting.chosen(layers)
    found = {0: torch.tensor(0.1), 1: torch.tensor(0.5), 2: torch.tensor(0.1), 3: torch.tensor(0.2)}
    ready = waiting.calibrated(Limits(found, {"table": "0a1b"}))
    assert ready.order(layers) == [1, 3, 0, 2], "of equally sensitive layers the earlier one"
    assert ready.chosen(layers) == ("int2", "int4", "int2", "int4")
    assert ready.info()["calibration"] == {"table": "0a1b"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["mean_bits=1.5"], "codec.mean_bits=1.5 is not possible: a number from 2 to 4"),
        (["mean_bits=null"], "codec.mean_bits=None"),
        (["layers=middle"], "allowed are sensitive, first, last, or a list of int2, int4"),
        (["layers=[int4,int9]", "mean_bits=null"], "codec.layers='int9'"),
        (["layers=[int4,int2]"], "codec.mean_bits=3"),
        (["layers=sensitive"], "codec.layers=sensitive needs it"),
    ],
)
def test_settings_that_cannot_be(changes: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build(conf_tree.config("codec", "int4_by_layer", *changes), "codec")
    assert says in str(caught.value)


def test_every_chosen_codec_is_checked_in_a_stack() -> None:
    """Blocks of tokens in some layers only are refused in a phase that evicts single tokens, as in all."""
    assert len(codecs_of(by_layer())) == 3
    with pytest.raises(UserError, match="blocks of 32 tokens"):
        Stack(keep=conf_tree.keep("h2o", 64), keys=by_layer(), phase="always")
    with pytest.raises(UserError, match="that needs no calibration"):
        by_layer(codecs={"int8": conf_tree.member("codec", "int8_static")}, mean_bits=8)
