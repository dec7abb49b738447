"""What holds for every test: under CI a skipped test is a failed one, for CI installs all that a test may need.

But for what the oldest supported transformers has not: families and kinds of caches came later. And what tests of several rooms
ask for by name.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from importlib.metadata import version

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from harness.configure import arms, stack_labels
from harness.files.paths import CONF
from tests.support import composed_once as once

OLDEST = version("transformers").startswith("5.2.")
LACKS = ("transformers ", "this version of transformers ")  # how the reasons of such skips begin


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What importing makes stays: the collector need not walk through its half a million objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    lacks = OLDEST and call.excinfo is not None and str(call.excinfo.value).startswith(LACKS)
    if report.skipped and os.environ.get("CI") and not lacks and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {call.excinfo and call.excinfo.value}"
    return report


@pytest.fixture
def composing() -> Iterator[None]:
    """Hydra is ready with conf/, as in the command itself; a module asks for it with `usefixtures`."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that was composed before is not composed again: for modules whose tests name the same stacks of conf/."""
    for module in (arms, stack_labels):
        monkeypatch.setattr(module, "compose_stack", once.compose_stack)
