"""The page as its reader uses it, in a real browser under a driver: clicks, keys, filters, exports, colours.

Every session ends with an empty console and without a single request.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from harness.pages.markup import one_line
from tests.support import explored
from tests.support import hostile_names as hostile
from tests.support.driver import choose, downloaded, find, point, press, value, wait

pytestmark = pytest.mark.browser


def row(driver: Any, label: str) -> Any:
    found = find(driver, f'#s0-points0 tr[data-id="{value(driver, point(label))}"]')
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def test_a_click_on_a_point_opens_all_that_is_known_of_it(driver: Any) -> None:
    from selenium.webdriver import ActionChains

    plot = find(driver, "#s0-frontier")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    place = value(
        driver,
        f"""(() => {{ const plot = document.getElementById('s0-frontier'), trace = plot.data.find(t => t.name === 'h2o');
        const i = trace.meta.ids.indexOf({point("h2o 0.1")}), axes = plot._fullLayout, box = plot.getBoundingClientRect();
        return [axes.xaxis._offset + axes.xaxis.d2p(trace.x[i]) - box.width / 2,
          axes.yaxis._offset + axes.yaxis.d2p(trace.y[i]) - box.height / 2]; }})()""",
    )
    ActionChains(driver).move_to_element_with_offset(plot, *map(round, place)).pause(0.3).click().perform()
    wait(driver, "document.querySelectorAll('#detail .js-plotly-plot').length === 1")
    assert find(driver, "#detail h2").text == "h2o 0.1"
    command = (
        "python -m harness model=smollm2 task=needle limit=20 compress=h2o compress.keep.sinks=8 compress.keep.budget.value=0.1"
    )
    assert find(driver, "#detail .command").text == command
    kinds = [one.text for one in driver.find_elements("css selector", "#detail .bars span")]
    assert kinds[::2] == ["payload", "positions", "state", "padding"] and all("B" in size for size in kinds[1::2])
    assert value(driver, "document.querySelector('#detail .js-plotly-plot').data[0].z.length") == 5
    flips = driver.find_elements("css selector", "#detail .flip")
    assert 0 < len(flips) <= 6
    said = flips[0].text
    assert "Which number? " + one_line(hostile.CLOSES) in said and one_line(explored.ANSWER) in said and "4271893" in said
    assert "kept" in find(driver, "#detail .about").text
    assert value(driver, "document.querySelector('tr.picked').cells[0].textContent") == "h2o 0.1"
    assert (
        value(driver, "Math.max(...document.getElementById('s0-frontier').data.find(t => t.name === 'h2o').marker.size)") == 20
    )
    find(driver, "#detail .copy").click()
    assert find(driver, "#detail .copy").text == "copied"
    find(driver, "#detail [aria-label='more bytes']").click()
    assert find(driver, "#detail h2").text != "h2o 0.1"


def test_hostile_names_and_answers_are_shown_as_they_are(driver: Any) -> None:
    row(driver, hostile.RUNS).click()
    wait(driver, "document.querySelectorAll('#detail .flip').length > 0")
    assert find(driver, "#detail h2").text == hostile.RUNS
    assert one_line(explored.ANSWER) in find(driver, "#detail .flip").text
    assert driver.find_elements("css selector", "#detail img, #detail a, #filters img, #sides img") == []
    assert hostile.RUNS.replace("'", "") in find(driver, "#detail .command").text.replace("'", "")


def test_a_stream_has_its_curve_beside_the_full_cache_and_no_map(driver: Any) -> None:
    value(driver, f"pick({point('h2o 0.1', 3)})")
    names = value(driver, "document.querySelector('#detail .js-plotly-plot').data.map(t => t.name)")
    assert names == ["full", "h2o 0.1"]


def test_the_keyboard_reaches_rows_points_and_the_way_back(driver: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    active = "document.activeElement"
    find(driver, "[data-search=s0-points0]").click()
    for _ in range(60):  # over the buttons of the table and its columns to its one stop among the rows
        press(driver, Keys.TAB)
        if value(driver, f"{active}.tagName") == "TR":
            break
    first = value(driver, f"{active}.cells[0].textContent")
    press(driver, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP)
    second = value(driver, f"{active}.cells[0].textContent")
    assert second == value(driver, "document.querySelector('#s0-points0 tbody').rows[1].cells[0].textContent") != first
    press(driver, Keys.ENTER)
    assert find(driver, "#detail h2").text == second and value(driver, f"{active}.id") == "detail"
    press(driver, Keys.ARROW_RIGHT)
    assert find(driver, "#detail h2").text != second
    press(driver, Keys.ESCAPE)
    assert not find(driver, "#detail").is_displayed() and value(driver, f"{active}.cells[0].textContent") == second

    driver.execute_script("document.getElementById('s0-frontier').focus()")
    press(driver, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    at = value(driver, "store.points.label[document.getElementById('s0-frontier').dataset.at]")
    assert wait(driver, f"document.querySelector('#s0-frontier .hoverlayer').textContent.startsWith({at!r})")
    press(driver, Keys.ENTER)
    assert find(driver, "#detail h2").text == at
    press(driver, Keys.ESCAPE)
    assert value(driver, f"{active}.id") == "s0-frontier"


SHOWN = """(() => { const plot = document.getElementById('s0-frontier'), out = new Set();
  for (const trace of plot.data) if (trace.mode === 'lines+markers' && !trace.meta.base) trace.x.forEach((x, i) => { if (x !== null) out.add(trace.meta.ids[i]); });
  const labels = ids => [...new Set([...ids].map(id => store.points.label[id]))].sort();
  return {points: labels(out), rows: labels([...document.querySelectorAll('#s0-points0 tbody tr')].filter(r => !r.hidden).map(r => +r.dataset.id)),
    bars: [...document.getElementById('s0-bytes0').data[0].y].sort(), said: document.getElementById('passing').textContent,
    sections: [...document.querySelectorAll('main > section')].filter(s => !s.hidden).map(s => s.id),
    maps: [...document.querySelector('[data-plot=s0-heat0]').options].filter(o => !o.hidden).map(o => o.text).sort()}; })()"""


def test_filters_reach_figures_maps_tables_and_sections_alike(driver: Any) -> None:
    whole = value(driver, SHOWN)
    assert whole["sections"] == ["s0", "s1", "s2"]
    choose(driver, "[data-filter=family]", "eviction + quantization")
    choose(driver, "[data-filter=budget]", "fraction 0.1 ")
    seen = value(driver, SHOWN)
    assert seen["points"] == seen["rows"] == seen["bars"] == seen["maps"] == ["snapkv_int4 0.1"]
    assert seen["said"].startswith("3 of ") and seen["sections"] == ["s0", "s1"]
    find(driver, "[data-plot=s0-frontier] [value=ratio]").click()
    assert value(driver, SHOWN)["points"] == ["snapkv_int4 0.1"], "another unit keeps the filter"
    choose(driver, "[data-filter=model]", "tiny")
    assert value(driver, SHOWN)["sections"] == []
    find(driver, "#filters button").click()
    again = value(driver, SHOWN)
    assert {name: again[name] for name in ("points", "rows", "bars", "maps", "sections")} == {
        name: whole[name] for name in ("points", "rows", "bars", "maps", "sections")
    }
    choose(driver, "[data-filter=task]", "stream")
    lines = "document.getElementById('s2-curves0').data.filter(t => t.visible).map(t => t.name)"
    before = value(driver, lines)
    choose(driver, "[data-filter=family]", "full")
    assert set(value(driver, lines)) < set(before)


def test_a_table_is_searched_and_taken_along(driver: Any, session: tuple[Any, Path]) -> None:
    folder = session[1]
    find(driver, "[data-search=s0-points0]").send_keys("H2O 0.1")
    assert value(driver, SHOWN)["rows"] == ["h2o 0.1"]
    find(driver, "[data-export=s0-points0] [value=csv]").click()
    ((head, *rows),) = [list(csv.reader(downloaded(folder, "s0-points0.csv").splitlines()))]
    assert len(rows) == 1 and rows[0][0] == "h2o 0.1"
    assert float(rows[0][head.index("KV bytes")]) == pytest.approx(
        value(driver, f"store.points.bytes[{point('h2o 0.1')}]"), rel=1e-5
    )
    find(driver, "[data-search=s0-points0]").clear()
    find(driver, "[data-search=s0-points0]").send_keys("onerror")
    find(driver, "[data-export=s0-points0] [value=latex]").click()
    tex = value(driver, "document.querySelector('dialog textarea').value")
    assert r"\begin{tabular}{lrrrrrrrrr}" in tex and r"\textless{}img src=x onerror=window.PWNED=1\textgreater{}" in tex
    assert r"\%" in tex and tex.count(r" \\") == 2
    find(driver, "dialog button:nth-of-type(3)").click()
    find(driver, "[data-export=s0-points0] [value=markdown]").click()
    text = value(driver, "document.querySelector('dialog textarea').value").splitlines()
    assert (
        text[1] == "|" + " --- |" * 10
        and r"\<img src=x" in text[2]
        and len({line.replace(r"\|", "").count("|") for line in text}) == 1
    )
    find(driver, "dialog button:nth-of-type(2)").click()
    assert downloaded(folder, "s0-points0.md").splitlines() == text


NARROW = """(() => {
  const box = document.querySelector('#s0-points0').closest('.scroll'), cell = box.querySelector('tbody td');
  box.style.width = '500px'; box.scrollLeft = 300;
  const found = [box.scrollLeft, cell.getBoundingClientRect().left - box.getBoundingClientRect().left];
  box.scrollLeft = 0; box.style.width = '';
  return found;
})()"""


def test_a_narrow_table_keeps_the_names_of_its_rows_in_sight(driver: Any) -> None:
    scrolled, off = value(driver, NARROW)
    assert scrolled == 300 and abs(off) < 1


def test_a_figure_is_taken_along_as_svg(driver: Any, session: tuple[Any, Path]) -> None:
    value(
        driver,
        "document.querySelector('#s0-frontier [data-title*=SVG]').dispatchEvent(new MouseEvent('click', {bubbles: true}))",
    )
    text = downloaded(session[1], "s0-frontier.svg")
    assert text.startswith("<svg") and "question unseen while compressing" in text
    for part in ("smollm2 · needle: Quality against KV bytes", "higher is better · n = 20 a point", ">full<", ">int8<"):
        assert part in text


def test_bits_of_keys_and_values_are_a_map_whose_cells_open(driver: Any) -> None:
    plot = "document.getElementById('s0-bits0')"
    assert value(driver, f"[{plot}.data[0].x, {plot}.data[0].y]") == [["2 bit", "4 bit", "8 bit", "16 bit"]] * 2
    found = value(driver, f"{plot}.data[0].meta.ids.map(row => row.map(id => id === null ? null : store.points.label[id]))")
    assert found == [
        [None, "k2v4", None, None],
        ["k4v2", None, "k4v8", None],
        [None, "k8v4", "int8", None],
        [None, None, None, "full"],
    ]
    value(driver, f"{plot}.emit('plotly_click', {{points: [{{data: {plot}.data[0], pointNumber: [0, 1]}}]}})")
    assert find(driver, "#detail h2").text == "k2v4"


def test_two_runs_side_by_side(driver: Any) -> None:
    card = find(driver, "#sides summary")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", card)
    card.click()
    wait(driver, "document.querySelector('#sides-plot.js-plotly-plot .point') !== null")
    read = "[...document.querySelectorAll('#sides-table tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    rows = {cells[0]: cells for cells in value(driver, read)}
    left, right = (value(driver, f"store.points.score[{point('h2o 0.1', panel)}]") for panel in (0, 1))
    assert [float(rows["h2o 0.1"][i]) for i in (1, 2, 3)] == pytest.approx([left, right, right - left], abs=1e-3)
    assert hostile.RUNS in rows
    assert value(driver, "document.getElementById('sides-plot').layout.shapes.length") == 1
    choose(driver, "[data-side=right]", "smollm2 · docqa")
    assert not find(driver, "#sides-plot").is_displayed() and not find(driver, "#sides-table").is_displayed()
    assert find(driver, "#sides-note").text.startswith("needle (contains) and docqa (contains) are not compared")


LIGHT, DARK = "rgb(244, 246, 248)", "rgb(15, 18, 22)"
PAINT = """(() => ({page: getComputedStyle(document.body).backgroundColor,
  plots: [...new Set([...document.querySelectorAll('.js-plotly-plot')].map(p => p._fullLayout.paper_bgcolor))],
  full: document.getElementById('s0-frontier').data.find(t => t.name === 'full').marker.color}))()"""


def test_dark_and_light_follow_the_reader_and_paper_is_light(driver: Any) -> None:
    assert value(driver, PAINT) == {"page": LIGHT, "plots": ["white"], "full": "#1b1f24"}
    dark = {"page": DARK, "plots": ["#171b21"], "full": "#e8eaed"}
    find(driver, "#theme [value=dark]").click()
    assert value(driver, PAINT) == dark
    find(driver, "#theme [value=auto]").click()
    asked = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", asked)
    wait(driver, "painted")
    assert value(driver, PAINT) == dark
    driver.refresh()
    wait(driver, "document.body.dataset.ready === 'yes'")
    assert value(driver, PAINT) == dark
    find(driver, "[data-plot=s0-frontier] [value=paired]").click()
    assert value(driver, PAINT) == dark
    value(driver, "dispatchEvent(new Event('beforeprint'))")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {**asked, "media": "print"})
    assert value(driver, PAINT)["plots"] == ["white"]
    assert value(driver, "getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not find(driver, "#filters").is_displayed()
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_tasks_together_are_a_figure_a_table_and_a_sentence(driver: Any) -> None:
    said = find(driver, "b.big").text
    assert "is the smallest that is worse on none of them: needle (unseen) " in said and "docqa (unseen) " in said
    names = value(driver, "document.getElementById('j0-mean0').data.map(t => t.name)")
    assert {"full", "int8", "h2o", "frontier"} <= set(names)
    rows = value(driver, "[...document.querySelectorAll('#j0-points tbody tr')].map(r => r.cells[0].textContent)")
    assert "h2o 0.1" in rows and hostile.RUNS in rows


def test_a_table_of_several_tasks_is_taken_along_whole(driver: Any, session: tuple[Any, Path]) -> None:
    """The kind: an export that holds names and bytes, and no result."""
    find(driver, "[data-export=j0-points] [value=csv]").click()
    ((head, *rows),) = [list(csv.reader(downloaded(session[1], "j0-points.csv").splitlines()))]
    of = "needle, question unseen; contains, higher is better: "
    assert {f"{of}{name}" for name in ("of full", "verdict", "vs full", "95 % paired")} < set(head) and len(set(head)) == len(
        head
    )
    (own,) = [dict(zip(head, row, strict=True)) for row in rows if row[0] == "h2o 0.1"]
    assert own[f"{of}verdict"].startswith("clearly worse") and own[f"{of}95 % paired"].startswith("[")
    find(driver, "[data-export=j0-points] [value=latex]").click()
    tex = value(driver, "document.querySelector('dialog textarea').value")
    assert f"{{l{'r' * (len(head) - 1)}}}" in tex and "clearly worse" in tex
    find(driver, "dialog button:nth-of-type(3)").click()


def test_citations_stand_on_the_page(driver: Any) -> None:
    find(driver, "#citations summary").click()
    text = find(driver, "#citations").text
    assert "Zhenyu Zhang, Ying Sheng, Tianyi Zhou and others: H2O" in text and "arXiv:2306.14048" in text
    assert "no single paper" in text and f"No entry for k4v8, {hostile.RUNS}: " in text
    assert "@inproceedings{zhang2023h2o,\n  title" in find(driver, "#bibtex").text
