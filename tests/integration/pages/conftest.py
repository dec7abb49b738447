"""One page with all there is to explore, and one browser on it for all tests that use it as its reader does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import explored
from tests.support.driver import opened, wait


@pytest.fixture(scope="session")
def explored_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explored.write(tmp_path_factory.mktemp("explored") / "page.html")


@pytest.fixture(scope="session")
def session(explored_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """(driver, folder of downloads); in the end no name has done anything, the console is empty, nothing was asked for."""
    scratch = tmp_path_factory.mktemp("browser")
    with opened(explored_page, scratch) as driver:
        yield driver, scratch / "downloads"
        assert driver.execute_script("return window.PWNED ?? null") is None


@pytest.fixture
def driver(session: tuple[Any, Path], explored_page: Path) -> Any:
    """The driver on the page as it opens."""
    session[0].get(explored_page.as_uri())
    wait(session[0], "document.body.dataset.ready === 'yes'")
    return session[0]
