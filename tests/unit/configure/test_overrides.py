"""What is asked for on the command line is honoured or refused in one line, never dropped."""

from __future__ import annotations

import hydra
import pytest

from harness.configure.arguments import check_arguments
from harness.configure.arms import Arm, arms_of
from harness.errors import UserError

pytestmark = pytest.mark.usefixtures("composing", "composed_once")


def of(*overrides: str) -> list[Arm]:
    return arms_of(hydra.compose("config", overrides=list(overrides)), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("compress=full", "codec@compress.keys=int8"),
        ("stacks=[[full,'codec@compress.keys=int8']]",),
    ],
)
def test_the_full_cache_with_another_part_is_a_stack(overrides: tuple[str, ...]) -> None:
    """Kind: changes of `full` were dropped, wherever it was named."""
    full, changed = of(*overrides)
    assert (full.label, full.stack.compresses) == ("full", False)
    assert changed.label != "full" and changed.stack.keys.name == "int8" and changed.stack.values.name == "exact"


def test_the_full_cache_without_changes_is_there_once() -> None:
    assert [arm.label for arm in of("stacks=[full,int8,full]")] == ["full", "int8"]
    assert [arm.label for arm in of("compress=full")] == ["full"]


def test_quotes_are_no_part_of_a_name_and_the_last_choice_holds() -> None:
    assert {arm.label for arm in of("compress='int8'")} == {"full", "int8"}
    assert {arm.label for arm in of("compress=h2o", 'compress="int8"')} == {"full", "int8"}


def test_a_whole_budget_takes_the_place_of_a_point_value() -> None:
    """Kind: a value that the stack's points set again."""
    _, arm = of("compress=h2o", "compress.keep.budget={unit: tokens, value: 64}")
    assert arm.stack.keep is not None and arm.stack.keep.budget.value == 64 and arm.stack.keep.budget.unit == "tokens"


REFUSED = {
    "a phase of the full cache": (("compress=full", "compress.phase=always"), "changes nothing of the full cache"),
    "its view": (("compress=full", "compress.read=cached"), "changes nothing of the full cache"),
    "a member's own": (("stacks=[[full,'compress.chunk=64']]",), "changes nothing of the full cache"),
    "a value and points": (
        ("compress=h2o", "compress.points=[{keep.budget.value: 0.1}]", "compress.keep.budget.value=0.5"),
        "compress.points sets it too",
    ),
    "a label": (("compress=h2o", "compress.name=mine"), "compress.name="),
    "a part of nothing": (("compress=int8", "+layers@compress.keep.layers=pyramid"), "compress.keep="),
    "a part's name as a value": (("compress=int4", "compress.keys=int8"), "compress.keys='int8'"),
    "no stack": (("compress=int8", "compress._target_=builtins.dict"), "makes no harness.stages.stack.Stack"),
    "a point that is none": (("compress=h2o", "compress.points=[1]"), "compress.points=[1]"),
    "a point without a key": (("compress=h2o", "compress.points=[{1: 2}]"), "compress.points="),
}


@pytest.mark.parametrize("overrides, wanted", REFUSED.values(), ids=REFUSED)
def test_what_nothing_would_come_of_is_refused(overrides: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(UserError) as error:
        of(*overrides)
    assert wanted in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argument",
    ["compress=null", "compress=5", "compress=true", "compress=", "model=null", "model=[a]", "task=1.5", "corpus=true",
     "experiment=null", "codec@compress.keys=null", "hydra/launcher=null", "~compress", "~limit", "~model", "~results_dir"],
)  # fmt: skip
def test_a_member_of_a_group_is_a_name(argument: str) -> None:
    """Kind: Hydra raises a bare error for these, merges lists, and removes keys that every run has."""
    with pytest.raises(UserError) as error:
        check_arguments(
            ["compress=h2o", argument] if "compress" not in argument.split("=")[0] or "@" in argument else [argument]
        )
    assert argument.split("=")[0].lstrip("~") in str(error.value) and "\n" not in str(error.value)
