"""Every text of a page is text: names that are markup, scripts, templates or control characters show themselves and do nothing.

The kind: a name, answer or error of a record reaching the page, or the terminal, as anything but text.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.analysis.contrast import contrasts
from harness.analysis.findings import findings
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.pages import dashboard, table
from harness.pages.markup import markup, one_line
from tests.support import hostile_names as hostile
from tests.support.browser import ask
from tests.support.stream_factory import stream


def _records(folder: Path, seeds: int) -> list[dict[str, Any]]:
    made = [record for seed in range(seeds) for record in hostile.records(f"run{seed}", seed=seed)]
    streams = stream(folder, ["full", *hostile.ALL[:6]], [0.2, 0.5], documents=2, model=hostile.RUNS, task=hostile.STYLED)
    (folder / streams[0]["series_path"]).rename(folder / "series" / "<img src=x onerror=window.PWNED=9>")
    return made + streams


@pytest.fixture(scope="module", params=[1, 2], ids=["one run", "two seeds"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    records = _records(folder, request.param)
    path = folder / "dashboard.html"
    manifests = {record["run_id"]: {hostile.RUNS: {hostile.CLOSES: hostile.QUOTED}} for record in records}
    dashboard.write(findings(records, folder), path, manifests)
    return path


@pytest.mark.browser
def test_hostile_names_are_text_everywhere(page: Path, tmp_path: Path) -> None:
    seen = ask(
        page,
        """{ const pause = ms => new Promise(done => setTimeout(done, ms));
        const out = {hover: [], maps: []};
        for (const details of document.querySelectorAll('details')) details.open = true;
        for (const plot of document.querySelectorAll('.js-plotly-plot')) for (const subplot of plot._fullLayout._subplots.cartesian)
          for (const [i, trace] of plot.data.entries()) {
            if (plot._fullData[i].xaxis + plot._fullData[i].yaxis !== subplot || !plot._fullData[i].visible) continue;
            if (plot._fullData[i].visible !== true || plot._fullData[i].hoverinfo === 'skip') continue;
            try { Plotly.Fx.hover(plot, [{curveNumber: i, pointNumber: trace.type === 'heatmap' ? [0, 0] : 0}], subplot); }
            catch (e) { continue; }
            await pause(60); out.hover.push(plot.querySelector('.hoverlayer').textContent); }
        for (const select of document.querySelectorAll('select[data-plot]')) for (let i = 0; i < select.options.length; i += 1) {
          select.selectedIndex = i; select.dispatchEvent(new Event('change')); await pause(60);
          const plot = document.getElementById(select.dataset.plot);
          out.maps.push([select.value, [...plot.querySelectorAll('.annotation-text')].map(t => t.textContent).at(-1)]); }
        for (const select of document.querySelectorAll('select[data-lines]')) for (let i = 0; i < select.options.length; i += 1) {
          select.selectedIndex = i; select.dispatchEvent(new Event('change')); await pause(60); }
        for (const button of document.querySelectorAll('.switch button, th button')) { button.click(); await pause(5); }
        await pause(300);
        out.pwned = window.PWNED ?? null; out.title = document.title;
        out.foreign = [...document.querySelectorAll('img, iframe, object, a[href], svg a, main script, main br ~ u')].map(
          e => e.outerHTML);
        out.handlers = [...document.querySelectorAll('*')].flatMap(
          e => [...e.attributes].map(a => a.name).filter(name => /^(on|xlink|src)/.test(name)));
        out.scripts = document.scripts.length;
        out.legend = [...document.querySelectorAll('#s0-frontier .legendtext')].map(t => t.textContent);
        out.labels = [...document.querySelectorAll('table tbody td:first-child')].map(t => t.textContent);
        out.text = document.querySelector('main').textContent;
        return out; }""",
        tmp_path,
    )
    assert seen["pwned"] is None
    assert seen["foreign"] == seen["handlers"] == []
    assert seen["scripts"] == 5  # content, Plotly, the page's own, and two of this test
    assert hostile.RUNS in seen["title"]
    for name in map(one_line, hostile.ALL):
        assert any(label.startswith(name) for label in seen["labels"]), name
        assert any(name in text for text in seen["hover"]), name
        assert any(text == name for text in (legend.strip() for legend in seen["legend"])), name
        assert name in seen["text"]
    assert len(seen["maps"]) >= 17
    assert all(chosen.split() == title.split() for chosen, title in seen["maps"])


def test_what_the_page_embeds_cannot_end_its_script(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    data = re.search(r'<script id="content" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "<" not in data[1] and "\u2028" not in data[1] and "\u2029" not in data[1]
    assert text.count("<main>") == text.count("</main>") == 1
    assert "onerror=window" in text, "it is there, as text"


def test_a_terminal_shows_names_as_they_are(tmp_path: Path) -> None:
    records = _records(tmp_path, 1)
    sink = io.StringIO()
    console = Console(file=sink, width=2000, color_system="truecolor", force_terminal=True, legacy_windows=False)
    table.show(rank(points(records)), console)
    first = points(records)["label"].iloc[1]
    table.show_contrasts(contrasts(records, [first]).frame, console)
    shown = sink.getvalue()
    for name in map(one_line, hostile.ALL):
        assert name in shown, name
    assert "\x1b[31m" not in shown and "\u202e" not in shown and "\x07" not in shown
    assert "\x1b]8" not in shown, "no link"


def test_one_line_spells_out_what_cannot_be_seen() -> None:
    assert one_line("a\nb\x1b[31m\x7f") == r"a\nb\x1b[31m\x7f"
    assert one_line("\u202e\ud83d\u2028") == "\\u202e\\ud83d\\u2028"
    assert one_line("ไทย é 👩‍👩‍👧 中文") == "ไทย é 👩‍👩‍👧 中文"
    assert markup("<a & \"b\" 'c'>%{x}") == "&lt;a &amp; &#34;b&#34; &#39;c&#39;&gt;%&#123;x}"
