"""What a changed stack is called: its YAML's name and what was changed, in words; two stacks never share a label."""

from __future__ import annotations

import pytest

from harness.configure.arms import Arm, arms_of
from harness.configure.compose import compose, composing

pytestmark = pytest.mark.usefixtures("composed_once")


def of(*overrides: str) -> list[Arm]:
    with composing():
        return arms_of(compose(overrides), overrides)


CALLED = {
    "keydiff, always": ["compress=keydiff", "compress.phase=always"],
    "sink_h2o, int8 keys": ["compress=sink_h2o", "codec@compress.keys=int8"],
    "snapkv, 64 recent": ["compress=snapkv", "compress.keep.recent=64"],
    "h2o, 8 sinks": ["stacks=[[h2o,'compress.keep.sinks=8']]"],
    "h2o, 1 sink": ["compress=h2o", "compress.keep.sinks=1"],
    "lagkv, 8 sinks": ["compress=lagkv", "compress.keep.sinks=8"],
    "snapkv, int4": ["compress=snapkv", "codec@compress.keys=int4", "codec@compress.values=int4"],
    "snapkv, int4, codec group 64": [
        "compress=snapkv", "codec@compress.keys=int4", "codec@compress.values=int4",
        "compress.keys.group=64", "compress.values.group=64",
    ],
    "int4, keys residual 0": ["compress=int4", "compress.keys.residual=0"],
    "snapkv, pyramid layers, layers beta 10": [
        "compress=snapkv", "layers@compress.keep.layers=pyramid", "compress.keep.layers.beta=10",
    ],
    "h2o, keep pyramidkv, uniform layers, prefill": [
        "compress=h2o", "layers@compress.keep.layers=uniform", "keep@compress.keep=pyramidkv", "compress.phase=prefill",
    ],
    "h2o, keep pyramidkv, prefill": ["compress=h2o", "compress.phase=prefill", "keep@compress.keep=pyramidkv"],
    "snapkv, window 16": ["compress=snapkv", "compress.keep.scorer.window=16"],
    "h2o, every 4 tokens": ["compress=h2o", "compress.phase=every_n", "compress.every=4"],
    "h2o, every token": ["compress=h2o", "compress.phase=every_n"],
    "snapkv_chunked, chunks of 64": ["compress=snapkv_chunked", "compress.chunk=64"],
    "streaming, cache positions": ["compress=streaming", "compress.positions=cache"],
    "int8, decoded copy": ["compress=int8", "compress.read=cached"],
    "h2o, budget in tokens": ["compress=h2o", "compress.keep.budget={unit: tokens, value: 64}"],
    "duo, heads [[0, 1], [2, 0]]": ["compress=duo", "compress.keep.heads.heads=[[0,1],[2,0]]"],
    "full, int8 keys": ["compress=full", "codec@compress.keys=int8"],
    "snapkv, nothing evicted, cache positions": [
        "compress=snapkv", "compress.keep=null", "compress.points=[{}]", "compress.positions=cache",
    ],
    "int8_static, codec calibration corpus kjv": [
        "compress=int8_static", "corpus@compress.keys.calibration.corpus=kjv", "corpus@compress.values.calibration.corpus=kjv",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("label", "overrides"), CALLED.items(), ids=CALLED)
def test_a_changed_stack_has_the_label_that_a_person_would_write(label: str, overrides: list[str]) -> None:
    assert {arm.label for arm in of(*overrides)} == {"full", label}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("h2o", ["compress=h2o", "compress.keep.budget.value=0.3"]),
        ("h2o", ["compress=h2o", "compress.points=[{keep.sinks: 2}]"]),
        ("int8", ["compress=int8", "compress.chunk=64"]),
        ("int4", ["compress=int4", "codec@compress.keys=int4"]),
        ("h2o", ["compress=h2o", "compress.keep.sinks=0"]),
    ],
)
def test_points_and_what_changes_nothing_do_not_show(name: str, overrides: list[str]) -> None:
    assert {arm.label for arm in of(*overrides)} == {"full", name}


def test_the_order_of_changes_is_no_part_of_a_label() -> None:
    changes = ["compress.keep.sinks=4", "codec@compress.values=int8", "compress.keep.recent=8", "codec@compress.keys=int8"]
    (one,), (other,) = ({arm.label for arm in of("compress=h2o", *order)} - {"full"} for order in (changes, changes[::-1]))
    assert one == other == "h2o, int8, 8 recent, 4 sinks"


def test_stacks_that_differ_have_labels_that_differ() -> None:
    """Kind: two stacks under one name would be one curve on a plot."""
    changes = [
        "compress.keep.sinks=4", "compress.keep.recent=4", "compress.keep.scorer.window=4", "compress.keep.scorer.kernel=3",
        "compress.keep.budget={unit: tokens, value: 64}", "compress.phase=chunked", "compress.read=cached",
        "compress.positions=cache", "codec@compress.keys=int8", "codec@compress.values=int8", "keep@compress.keep=knorm",
        "layers@compress.keep.layers=pyramid", "layers@compress.keep.layers=entropy", "heads@compress.keep.heads=adakv",
    ]  # fmt: skip
    labels = [{arm.label for arm in of("compress=snapkv", change)[1:]} for change in changes]
    assert all(len(found) == 1 for found in labels), labels
    assert len(set().union(*labels)) == len(changes)
