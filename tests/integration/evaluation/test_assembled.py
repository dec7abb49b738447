"""Stacks whose parts are measured before a run go through a run's own assembly, as their YAMLs have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.configure.arms import Arm, arms_of
from harness.configure.compose import compose
from harness.evaluation.assemble import assemble

TINY = ["model=tiny_llama", "task=needle", "task.lengths=[256]"]
ROLES = {  # one stack a kind of measurement, and the parts that it measures
    "int8_static": ("keys", "values"),
    "kvquant": ("keys", "values"),
    "kvtuner_3bit": ("keys", "values"),
    "palu": ("keys", "values"),
    "low_rank_weights": ("keys", "values"),
    "gqa_aligned": ("share",),
}


@pytest.fixture(scope="module")
def arms() -> tuple[Arm, ...]:
    """Stacks that are measured first, on the tiny model, at their first point and on a short text."""
    short = {
        name: ",".join(f"'compress.{role}.calibration.{key}=256'" for role in roles for key in ("tokens", "window"))
        for name, roles in ROLES.items()
    }
    cfg = compose([*TINY, f"stacks=[{','.join(f'[{name},{changes}]' for name, changes in short.items())}]"])
    first = {arm.label: arm for arm in reversed(arms_of(cfg, []))}
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return assemble(config, list(first.values())).arms


def test_every_calibrated_stack_is_ready(arms: tuple[Arm, ...]) -> None:
    assert {arm.label: arm.failure for arm in arms if arm.failure} == {}
    assert len(arms) == len(ROLES)


def test_a_record_names_the_table_of_what_read_a_text_and_of_nothing_else(arms: tuple[Arm, ...]) -> None:
    for arm in arms:
        for role in ("keys", "values", "share"):
            part: Mapping[str, Any] = arm.config[role] or {}
            if part.get("calibration"):
                assert ("table" in part["calibration"]) == (part.get("of") != "weights"), (arm.label, role)
