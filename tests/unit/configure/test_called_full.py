"""Nothing but the full cache is called full: its records are what every other stack is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from harness.configure.arms import Arm, arms_of, reads_full
from harness.configure.compose import compose, composing
from harness.configure.objects import arm_of
from harness.errors import UserError
from harness.stages.codec.int8 import Int8
from harness.stages.stack import Stack


def arms(*overrides: str) -> list[Arm]:
    with composing():
        return arms_of(compose(list(overrides)), list(overrides))


@pytest.mark.parametrize(
    "change",
    ["{positions: cache}", "{keys._target_: harness.stages.codec.int8.Int8}"],
    ids=["positions", "codec"],
)
def test_a_point_that_changes_the_full_cache_is_called_by_what_it_does(change: str) -> None:
    found = arms("compress=full", f"compress.points=[{change}]")
    assert [arm.label for arm in found if not arm.stack.compresses] == ["full"]
    assert [reads_full(arm.label) for arm in found if arm.stack.compresses] == [False]


@pytest.mark.parametrize("label", ["full", "Full", " full ", "full\u200b", "f\u2060ull", "\uff46ull", "full.", "f-u-l-l"])
def test_a_label_that_reads_full_is_refused(label: str) -> None:
    with pytest.raises(UserError, match="cannot be called"):
        arm_of(Stack(keys=Int8(), values=Int8()), label)


@dataclass(frozen=True, kw_only=True)
class Named(Int8):
    name: str = "full"


def test_a_codec_named_full_makes_no_full_cache() -> None:
    assert not reads_full(arm_of(Stack(keys=Named(), values=Named())).label)


@pytest.mark.parametrize("label", ["full_int8", "fully", "half full", "h2o"])
def test_other_labels_are_their_own(label: str) -> None:
    assert arm_of(Stack(keys=Int8(), values=Int8()), label).label == label
