"""What opening a page costs a browser: seconds of its main thread from the file to the drawn page, and the page's size.

python tests/bench/page_open.py [POINTS ...]      by default 600 and 3,000; the median of five openings after a first one
The time is that of the thread, not of the clock, so other work on the machine does not count.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.integration.pages.test_page_size import BUDGETS, page_of
from tests.support.driver import opened, wait


def main(sizes: list[int]) -> None:
    for points in sizes:
        with tempfile.TemporaryDirectory() as folder:
            page = page_of(Path(folder, "page.html"), points // BUDGETS)
            with opened(page, Path(folder)) as driver:
                driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
                seconds = []
                for _ in range(5):
                    driver.get(page.as_uri())
                    wait(driver, "document.body.dataset.ready === 'yes'")
                    known = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
                    seconds.append(next(one["value"] for one in known if one["name"] == "TaskDuration"))
            print(f"{points} points: {median(seconds):.2f} s, page {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [600, 3000])
