"""A written page in a Chromium that a real driver steers: clicks, keys and selections as a user makes them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--window-size=1500,1100",
)


@contextmanager
def opened(page: Path, scratch: Path) -> Iterator[Any]:
    """The driver on the page, drawn; what the page downloads lies in scratch/downloads.

    On leaving, the page must have asked for no address and put nothing on the console.
    """
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in found.items() if path is None] + ([] if find_spec("selenium") else ["selenium"])
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            f"{', '.join(missing)} needed: make ci-deps, pip install -e .[dev]"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(found["chromium"])
    for flag in (*FLAGS, f"--user-data-dir={scratch / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(scratch / "downloads")})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(found["chromedriver"])))
    try:
        driver.set_script_timeout(60)
        driver.get(page.as_uri())
        wait(driver, "document.body.dataset.ready === 'yes'")
        yield driver
        said = [entry["message"] for entry in driver.get_log("browser")]
        assert said == [], said
        asked = _asked(driver, page.as_uri()) - {page.as_uri()}
        assert asked == set(), asked
    finally:
        driver.quit()


def _asked(driver: Any, page: str) -> set[str]:
    """The addresses that the page asked for, but what it holds itself (data: and blob:)."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = {one["request"]["url"] for one in sent if one["documentURL"] == page}
    return {url for url in urls if not url.startswith(("data:", "blob:"))}


def wait(driver: Any, expression: str, seconds: float = 30) -> Any:
    """The value of a script expression once it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda here: here.execute_script(f"return {expression}"))


def value(driver: Any, expression: str) -> Any:
    """The value of a script expression, awaited."""
    return driver.execute_async_script(
        f"const done = arguments[0]; (async () => ({expression}))().then(done, e => done('fault: ' + e))"
    )


def find(driver: Any, css: str) -> Any:
    return driver.find_element("css selector", css)


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def choose(driver: Any, css: str, text: str) -> None:
    """Select the first option that starts with a text, as a user does."""
    from selenium.webdriver.support.ui import Select

    select = Select(find(driver, css))
    select.select_by_visible_text(next(one.text for one in select.options if one.text.startswith(text)))


def downloaded(folder: Path, name: str) -> str:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(folder, 20, poll_frequency=0.05).until(lambda here: (here / name).exists() and (here / name).stat().st_size)
    return (folder / name).read_text(encoding="utf-8")


def point(label: str, panel: int = 0) -> str:
    """The script expression of the place of a point."""
    return f"store.points.label.findIndex((one, id) => one === '{label}' && store.points.panel[id] === {panel})"
