"""A configuration is composed in one place, whoever asks for it, and whatever Hydra runs already."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from harness.configure.arms import stack_arms
from harness.configure.compose import compose
from harness.errors import UserError


def test_a_configuration_is_composed_without_a_running_hydra_and_leaves_none() -> None:
    GlobalHydra.instance().clear()
    assert compose(["model=tiny_llama", "limit=3"]).limit == 3
    assert [arm.point for arm in stack_arms("h2o", ["compress.keep.sinks=8"])][:1] == [{"keep.budget.value": 0.1}]
    assert not GlobalHydra.instance().is_initialized()


def test_the_hydra_of_another_program_is_put_back(tmp_path: Path) -> None:
    """Kind: a notebook that uses Hydra itself would compose its own configuration in place of ours, or lose it."""
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose([]).task is not None
        assert hydra.compose("config").mine == 1


def test_a_folder_beside_ours_is_searched_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\n")
    assert compose(["model=mine", f"hydra.searchpath=[{tmp_path}]"]).model.name == "mine"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model=nosuch"], "model=nosuch is not there: "),
        (["limits=3"], "limits is not a key: "),
        (["limit=["], "limit=[ is not"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
