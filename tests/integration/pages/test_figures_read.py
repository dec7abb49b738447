"""The figures of a page as a newcomer reads them: names in them, piles, a limit of bytes, filters, a narrow window, the dark."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.pages.looks import KIND_LOOKS, looks
from tests.support.driver import choose, find, point, press, value, wait

pytestmark = pytest.mark.browser

PLOT = "document.getElementById('s0-frontier')"
BOXES = f"""(() => [...{PLOT}.querySelectorAll('.names span')].map(one => {{
  const {{left, top, right, bottom}} = one.getBoundingClientRect(); return [one.textContent, left, top, right, bottom]; }}))()"""


@pytest.fixture(scope="module")
def driver(session: tuple[Any, Path], explored_page: Path) -> Any:
    """The driver on the page, opened once for all tests here: each leaves it as it found it."""
    session[0].get(explored_page.as_uri())
    wait(session[0], "document.body.dataset.ready === 'yes'")
    return session[0]


def overlapping(boxes: list[list[Any]]) -> list[tuple[str, str]]:
    return [
        (one[0], other[0])
        for i, one in enumerate(boxes)
        for other in boxes[i + 1 :]
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]


def test_the_frontier_is_named_in_the_figure_and_no_name_covers_another(driver: Any) -> None:
    boxes = value(driver, BOXES)
    texts = [box[0] for box in boxes]
    assert texts.count("full") == 2, "in both modes"
    front = set(value(driver, f"{PLOT}.data.flatMap(t => Object.values(t.meta?.labels ?? {{}}))"))
    named = {re.sub(r" [+]\d+$", "", text) for text in texts if not re.search(r"^\d+ points$", text)}
    assert len(named) > 2 and named <= front
    assert overlapping(boxes) == []


def test_a_click_where_several_points_lie_lists_them(driver: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    driver.execute_script(f"{PLOT}.scrollIntoView({{block: 'center'}})")
    value(driver, f"Plotly.relayout({PLOT}, {{'xaxis.range': [0, 40]}}).then(() => null)")  # all points of a score in one place
    wait(driver, f"{PLOT}._fullLayout.xaxis.range[1] === 40")
    assert any(re.search(r"[+]\d+$|^\d+ points$", box[0]) for box in value(driver, BOXES)), "the figure says how many"
    pile = value(
        driver,
        f"""(() => {{ const box = {PLOT}.getBoundingClientRect(), {{points}} = spots({PLOT}).get('x');
        const all = points.map(one => points.filter(other => isNear(one, other))).sort((a, b) => b.length - a.length)[0];
        return [all[0].left - box.width / 2, all[0].top - box.height / 2, all.length]; }})()""",
    )
    ActionChains(driver).move_to_element_with_offset(find(driver, "#s0-frontier"), *map(round, pile[:2])).pause(
        0.3
    ).click().perform()
    wait(driver, "document.getElementById('pile') !== null")
    buttons = driver.find_elements("css selector", "#pile button")
    assert len(buttons) >= 2 and find(driver, "#pile p").text == f"{len(buttons)} points lie here"
    name = buttons[1].text.rsplit(": ", 1)[0]
    buttons[1].click()
    assert find(driver, "#detail h2").text == name and driver.find_elements("id", "pile") == []
    value(driver, f"offer([...spots({PLOT}).values()][0].points.slice(0, 2), {{}}, {PLOT})")
    press(driver, Keys.ESCAPE)
    assert driver.find_elements("id", "pile") == [] and find(driver, "#detail").is_displayed(), "one key closes one thing"
    press(driver, Keys.ESCAPE)
    assert not find(driver, "#detail").is_displayed()
    value(driver, f"Plotly.relayout({PLOT}, {{'xaxis.autorange': true}}).then(() => null)")


def strengths(driver: Any, panel: int = 0) -> dict[str, float]:
    """How clearly each point of a panel is drawn."""
    found = f"""Object.fromEntries({PLOT}.data.filter(t => t.meta?.labels).flatMap(t => t.meta.ids.flatMap((id, i) =>
        store.points.panel[id] === {panel} ? [[id, t.marker.opacity[i]]] : [])))"""
    return dict(value(driver, found))


def test_a_limit_marks_the_best_point_that_fits_and_pales_the_others(driver: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    before = strengths(driver)
    known = value(driver, "store.points")
    ids = [i for i, panel in enumerate(known["panel"]) if panel == 0 and known["bytes"][i] is not None]
    fitting = [i for i in ids if known["bytes"][i] <= 0.3 * known["full"][i] and i not in known["unranked"]]
    best = min(fitting, key=lambda i: (-known["score"][i], known["bytes"][i]))
    find(driver, "#limit").send_keys("30 %", Keys.ENTER)
    said = find(driver, "#best").text
    assert f"needle, query-agnostic: {known['label'][best]}, " in said
    (mine,) = [words for words in said.split("; ") if "needle, query-agnostic: " in words]
    assert ("of the full cache's peak" in mine) is (known["over"][best] > 0.3), "a share of the peak is of the full cache's own"
    after = strengths(driver)
    assert {i for i in ids if after[str(i)] < before[str(i)]} == set(ids) - set(fitting)
    assert any("best that fits" in box[0] for box in value(driver, BOXES))
    find(driver, "#limit").send_keys(Keys.BACKSPACE, Keys.BACKSPACE, Keys.ENTER)
    assert value(driver, "document.getElementById('limit').validationMessage").startswith("a number with a unit")
    assert find(driver, "#best").text == said, "what cannot be read changes nothing"
    find(driver, "#filters button").click()
    assert strengths(driver) == before and not find(driver, "#best").is_displayed()


def test_a_filter_keeps_the_full_cache_and_draws_the_frontier_of_what_is_shown(driver: Any) -> None:
    whole = value(driver, f"[...{PLOT}.querySelectorAll('.legendtext')].map(t => t.textContent)")
    choose(driver, "[data-filter=family]", "eviction (")
    legend = value(driver, f"[...{PLOT}.querySelectorAll('.legendtext')].map(t => t.textContent)")
    assert set(legend) < {*whole, "frontier of what is shown"} and {"full", "h2o", "frontier of what is shown"} <= set(legend)
    assert "int8" not in legend
    line = value(driver, f"{PLOT}.data.filter(t => t.mode === 'lines').map(t => [t.x, t.y])[0]")
    shown = value(
        driver,
        f"""{PLOT}.data.filter(t => t.meta?.labels && !t.meta.base && (t.xaxis ?? 'x') === 'x').flatMap(
        t => t.x.map((x, i) => [x, t.y[i]])).filter(([x]) => x !== null)""",
    )
    front = [list(one) for one in zip(*line, strict=True)]
    assert front and all(one in shown for one in front) and all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(front))
    assert not any(x <= front[0][0] and y > front[0][1] for x, y in shown)
    joint = value(
        driver, "[...document.querySelectorAll('#j0-points tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    )
    assert "h2o 0.1" in joint and "int8" not in joint
    choose(driver, "[data-filter=phase]", "–")
    assert find(driver, "#filtered").text == "No point matches these filters."
    find(driver, "#filters button").click()


def test_a_row_of_tasks_together_opens_its_first_task_and_leads_to_the_others(driver: Any) -> None:
    row = find(driver, "#j0-points tbody tr:nth-child(2)")
    row.click()
    name = value(driver, "document.querySelector('#j0-points tbody tr:nth-child(2)').cells[0].textContent")
    assert find(driver, "#detail h2").text == name
    others = [one.text for one in driver.find_elements("css selector", "#detail .elsewhere button")]
    assert "smollm2, docqa, query-agnostic" in others
    driver.find_elements("css selector", "#detail .elsewhere button")[others.index("smollm2, docqa, query-agnostic")].click()
    assert find(driver, "#detail h2").text == name and "docqa" in find(driver, "#detail p.quiet").text
    value(driver, "unpick()")


def test_a_map_opens_at_the_point_that_the_headline_names(driver: Any) -> None:
    chosen = value(driver, "document.querySelector('[data-plot=s0-heat0]').selectedOptions[0].text")
    assert chosen in find(driver, "#s0 .facts b.big").text
    assert value(driver, "document.getElementById('s0-heat0').layout.annotations[1].text") == chosen


def test_the_bytes_of_a_stream_are_shares_of_the_full_cache_at_the_same_moment(driver: Any) -> None:
    value(driver, f"pick({point('full', 3)}).then(() => null)")
    shares = [
        float(one.text.split(", ")[1].removesuffix(" %")) for one in driver.find_elements("css selector", "#detail .bars .r")
    ]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert "full cache at the end of the stream" in find(driver, "#detail .bars + p").text
    value(driver, "unpick()")


FOLDED = f"""(() => {{ const l = {PLOT}._fullLayout; return {{x: [l.xaxis.domain, l.xaxis2.domain],
  y: [l.yaxis.domain, l.yaxis2.domain], wide: document.documentElement.scrollWidth - innerWidth,
  filters: getComputedStyle(document.getElementById('filters')).position, titles: l.annotations.slice(0, 2).map(a => a.text)}}; }})()"""


def test_in_a_narrow_window_panels_stand_below_each_other_and_nothing_covers_a_title(driver: Any) -> None:
    before = value(driver, FOLDED)
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    wait(driver, f"{PLOT}._fullLayout.xaxis2.domain[0] === 0 && {PLOT}._fullLayout.width < 420")
    seen = value(driver, FOLDED)
    assert seen["x"] == [[0, 1], [0, 1]] and seen["y"][1][1] < seen["y"][0][0]
    assert seen["wide"] <= 0 and seen["filters"] == "static"
    boxes = value(driver, BOXES)
    assert overlapping(boxes) == [] and all(0 <= box[1] and box[3] <= 420 for box in boxes)
    legend, bar = (
        value(
            driver,
            f"(({{left, top, right, bottom}}) => [0, left, top, right, bottom])({PLOT}.querySelector('{css}').getBoundingClientRect())",
        )
        for css in (".legend", ".modebar")
    )
    assert overlapping([legend, bar, *boxes]) == []
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    wait(driver, f"{PLOT}._fullLayout.xaxis2.domain[0] > 0")
    assert value(driver, FOLDED) == before


def test_titles_keep_the_colours_of_a_theme_that_was_changed_in_a_narrow_window(driver: Any) -> None:
    narrow = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    wait(driver, f"{PLOT}._fullLayout.xaxis2.domain[0] === 0 && {PLOT}._fullLayout.width < 420")
    find(driver, "#theme [value=dark]").click()
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    wait(driver, f"{PLOT}._fullLayout.xaxis2.domain[0] > 0")
    colours = f"[...new Set({PLOT}._fullLayout.annotations.map(note => note.font.color))]"
    assert value(driver, colours) == ["#e8eaed"]
    find(driver, "#theme [value=auto]").click()
    wait(driver, "!painted")
    assert value(driver, colours) == ["#1b1f24"]


def test_colours_stay_apart_in_the_dark(driver: Any) -> None:
    kinds = [colour for colour, _ in KIND_LOOKS.values()]
    stacks = [look.colour for look in looks([f"s{i}" for i in range(11)], "full").values()]
    for colours in (kinds, stacks):
        dark = value(driver, f"{colours}.map(colour => hue(colour, true))")
        assert len(set(dark)) == len(colours)
        assert value(driver, f"{dark}.map(colour => hue(colour, false))") == colours
    find(driver, "#theme [value=dark]").click()
    faint = value(driver, f"Math.min(...{PLOT}.data.filter(t => t.meta?.labels).flatMap(t => t.marker.opacity))")
    assert faint >= 0.8
    find(driver, "#theme [value=auto]").click()
