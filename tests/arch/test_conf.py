"""Every YAML of the configuration composes and instantiates, and carries its own name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import hydra
import pytest

from harness.configure.arms import FULL, Arm, arms_of
from harness.stages.stack import Stack

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
CONF = Path(__file__).parents[2] / "conf"


def members(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@lru_cache(maxsize=1)
def every_arm() -> list[Arm]:
    """Of a run that names every stack there is; each is composed as `compress=NAME` is."""
    overrides = [f"stacks=[{','.join(members('compress'))}]"]
    return arms_of(hydra.compose("config", overrides=overrides), overrides)


def test_every_file_is_a_stack_of_its_own_and_its_name_is_the_label() -> None:
    labels = [arm.label for arm in every_arm()]
    assert labels[0] == FULL and labels.count(FULL) == 1
    assert set(labels) == set(members("compress"))


@pytest.mark.parametrize("name", members("compress"))
def test_every_stack_builds_at_every_point(name: str) -> None:
    found = [arm for arm in every_arm() if arm.label == name]
    assert all(isinstance(arm.stack, Stack) for arm in found)
    points = [str(arm.point) for arm in found]
    assert len(points) == len(set(points)) > 0


def test_a_stack_named_alone_comes_beside_the_full_cache() -> None:
    found = arms_of(hydra.compose("config", overrides=["compress=h2o"]), ["compress=h2o"])
    assert [arm.label for arm in found] == [FULL, *["h2o"] * (len(found) - 1)] and len(found) > 1


def test_the_well_known_stacks_are_there() -> None:
    wanted = "full int8 int4 window streaming h2o sink_h2o sink_h2o_int8 snapkv tova knorm random snapkv_int4"
    assert set(wanted.split()) <= set(members("compress"))


@pytest.mark.parametrize("name", members("experiment"))
def test_every_experiment_composes(name: str) -> None:
    cfg = hydra.compose("config", overrides=[f"experiment={name}"])
    assert len(arms_of(cfg, [])) >= 2


def test_the_default_experiment_has_eight_stacks_and_several_points() -> None:
    found = arms_of(hydra.compose("config"), [])
    assert len({arm.label for arm in found if arm.label != FULL}) >= 8
    assert max(sum(arm.label == label for arm in found) for label in {c.label for c in found}) >= 3
