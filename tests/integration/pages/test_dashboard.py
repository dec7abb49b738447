"""The page in a real browser, offline: it draws, switches, names points in full, and lists what it cannot draw."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.analysis.findings import findings
from harness.errors import UserError
from harness.pages import dashboard
from harness.pages.looks import looks
from tests.support.browser import ask, content
from tests.support.record_factory import ROW, STACKS, grid, make, perplexity, sweep
from tests.support.stream_factory import stream, write_streams


class Sources(HTMLParser):
    """Every address that a tag of the page would fetch; a link is asked for by its reader alone."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = ("src", "srcset", "data", "poster", *(() if tag == "a" else ("href",)))
        self.found += [value or "" for name, value in attrs if name in names]


LONG = ("int4-group32-residual128", "int4-group32-residual256")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modes of a needle sweep and a perplexity run, with everything that is hard to draw."""
    records = sweep(repeats=2) + sweep(query_aware=True, repeats=2)
    for name, size in zip(LONG, (ROW * 500, ROW * 600), strict=True):
        records += [make(**e, stack=name, kv_bytes_context=size, storage="simulated") for e in grid(repeats=2)]
    records += [make(**e, stack="empty", kv_bytes_context=0, score=0.0) for e in grid(repeats=2)]
    records += [make(**e, stack="tiny", score=None, status="refused", error="budget <9> is below 36") for e in grid(repeats=2)]
    records += perplexity("full", [2.5, 2.8, 3.0]) + perplexity("int4", [2.6, 2.9, 3.1], kv_bytes_context=ROW * 300)
    records += perplexity("broken", [800.0] * 3, kv_bytes_context=ROW * 100)
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    dashboard.write(findings(records), path, {"smollm2-needle-0a1b2c3d": {"versions": {"torch": "2.x <&>"}}})
    return path


def test_the_page_is_one_file_without_any_address(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert Sources(text).found == []
    assert "@import" not in text.split("</style>")[0]
    assert len(re.findall(r"\* plotly\.js v\d", text)) == 1
    assert "default-src 'none'" in text
    assert [item.name for item in page.parent.iterdir()] == ["dashboard.html"]


def test_twelve_figures_and_two_thousand_points_stay_under_eight_megabytes(tmp_path: Path) -> None:
    records = []
    for task in range(4):
        for stack in ["full", *(f"stack-with-a-long-name-{i}" for i in range(50))]:
            for budget in range(10 if stack != "full" else 1):
                config = {
                    "keep": {
                        "budget": {"unit": "tokens", "value": budget},
                        "scorer": {"_target_": "a.b.Scorer", "window": len(records)},
                    }
                }
                more = {
                    "stack": stack,
                    "stack_config": config,
                    "point": {"keep.budget.value": budget} if stack != "full" else {},
                }
                shape = {"task": f"task{task}", "run_id": f"run{task}", "kv_bytes_context": len(records) * 7919 + ROW}
                records += [make(example_id=f"e{i}", score=float(i), **more, **shape) for i in range(2)]
    path = tmp_path / "large.html"
    dashboard.write(findings(records), path)
    assert len(content(path)["figures"]) == 12
    assert path.stat().st_size < 8_000_000


def test_no_two_stacks_share_colour_and_shape_and_order_does_not_matter() -> None:
    names = [f"s{i}" for i in range(60)]
    table = looks(names, "full")
    assert len({(look.colour, look.symbol) for look in table.values()}) == 61
    assert table == looks(reversed(names), "full")
    twelve = looks(STACKS, "full")
    assert len({look.symbol for look in twelve.values()}) == 12  # also told apart in greyscale


def test_a_stack_looks_the_same_in_every_figure_and_modes_share_no_trace(page: Path) -> None:
    figures = content(page)["figures"]
    seen: dict[str, set[tuple[str, str]]] = {}
    for trace in (t for f in figures.values() for t in f["data"] if t.get("legendgroup", "frontier") != "frontier"):
        seen.setdefault(trace["name"], set()).add((trace["marker"]["color"], trace["marker"]["symbol"][0]))
        modes = {re.search("query-(aware|agnostic)", text)[1] for text in trace["customdata"]}
        assert len(modes) == 1
    assert {len(found) for found in seen.values()} == {1}
    assert seen[LONG[0]] != seen[LONG[1]]
    assert all(symbol.endswith("-open") for _, symbol in seen[LONG[0]])
    titles = [note["text"] for note in figures["s0-frontier"]["layout"]["annotations"]]
    assert ["query-agnostic" in titles[0], "query-aware" in titles[1]] == [True, True]


def test_beaten_points_are_lighter_not_dropped(page: Path) -> None:
    traces = [t for t in content(page)["figures"]["s0-frontier"]["data"] if t["mode"] == "lines+markers"]
    assert sum(len(trace["x"]) for trace in traces) == 2 * (3 + 9 * 6) + 3
    assert {value for trace in traces for value in trace["marker"]["opacity"]} == {0.6, 1.0}


def test_what_is_not_drawn_is_listed_with_counts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<b>1 point</b>: not drawn: no score: 20 refused - budget &lt;9&gt; is below 36 (20x)" in text
    assert "<b>1 point</b>: not drawn: score is not finite (score infinite)" in text
    assert "<b>1 point</b>: zero bytes: only on the linear axis" in text


def test_no_records_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        dashboard.write(findings([]), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.browser
def test_it_draws_everything_offline_without_a_fault(page: Path, tmp_path: Path) -> None:
    drawn = ask(
        page,
        """({plots: document.querySelectorAll('.js-plotly-plot').length, ready: document.body.dataset.ready,
        points: document.querySelectorAll('#s0-frontier .scatterlayer .point').length,
        fetched: performance.getEntriesByType('resource').length,
        ticks: [...document.querySelectorAll('#s0-frontier .xtick text')].map(t => t.textContent),
        share: document.querySelectorAll('[data-title^="Share"]').length})""",
        tmp_path,
    )
    assert drawn["ready"] == "yes"
    assert drawn["plots"] == len(content(page)["figures"]) == 7
    assert drawn["points"] >= 2 * 57 + 2
    assert drawn["fetched"] == 0
    assert drawn["share"] == 0
    assert "8.00 MiB" not in drawn["ticks"] and "8 MiB" in drawn["ticks"]


@pytest.mark.browser
def test_hover_gives_name_score_bytes_and_verdict_and_the_panel_of_details_the_rest(page: Path, tmp_path: Path) -> None:
    names = json.dumps([*LONG, "sink_h2o_int8"])
    shown = ask(
        page,
        f"""{{ const plot = document.getElementById('s0-frontier'), out = {{}};
        for (const name of {names}) {{
          const curveNumber = plot.data.findIndex(t => t.name === name);
          Plotly.Fx.hover(plot, [{{curveNumber, pointNumber: 0}}]);
          await new Promise(done => setTimeout(done, 300));
          pick(plot.data[curveNumber].meta.ids[0]);
          out[name] = [plot.querySelector('.hoverlayer').textContent, document.querySelector('#detail .about').textContent,
            plot.data[curveNumber].customdata[0].split('<br>').length]; }}
        return out; }}""",
        tmp_path,
    )
    for name in LONG:
        assert name in shown[name][0]
        assert "simulated" in shown[name][0]
    hover, text, lines = shown["sink_h2o_int8"]
    assert lines == 4
    for part in ("sink_h2o_int8 0.05", "n 20", "query-agnostic", "MiB", "% of full", "vs full "):
        assert part in hover and part in text
    assert "keep." not in hover and "_target_" not in text
    for part in ("budget fraction 0.05", "all examples ok"):
        assert part in text
    for part in ("payload", "metadata", "positions", "state", "logical", "keep.scorer=sink_h2o", "phase always"):
        assert part in text
    assert re.search(r"contains 0\.\d\d \[0\.\d\d, 0\.\d\d\]", text)


@pytest.mark.browser
def test_switches_change_unit_and_scale_and_the_linear_view_shows_zero(page: Path, tmp_path: Path) -> None:
    seen = ask(
        page,
        """{ const plot = document.getElementById('s0-frontier');
        const zero = () => { const i = plot.data.findIndex(t => t.name === 'empty');
          return plot.calcdata[i].filter(p => Number.isFinite(p.x) && p.i !== undefined
            && Number.isFinite(plot._fullLayout.xaxis.c2p(p.x))).length; };
        const state = () => ({type: plot._fullLayout.xaxis.type, second: plot._fullLayout.xaxis2.type, zero: zero(),
          title: plot._fullLayout.xaxis.title.text, x: plot.data.find(t => t.name === 'int8').x[0],
          ticks: plot.layout.xaxis.ticktext});
        const press = async value => { document.querySelector(`[data-plot=s0-frontier] [value=${value}]`).click();
          await new Promise(done => setTimeout(done, 500)); return state(); };
        return [state(), await press('linear'), await press('ratio'), await press('log'), await press('bytes')]; }""",
        tmp_path,
    )
    first, linear, ratio, log, back = seen
    assert [s["type"] for s in seen] == [s["second"] for s in seen] == ["log", "linear", "linear", "log", "log"]
    assert (first["zero"], linear["zero"]) == (0, 1)
    assert ratio["x"] == log["x"] == pytest.approx(0.516, abs=1e-3)
    assert first["x"] == back["x"] > 1e6
    assert all("B" in tick for tick in first["ticks"] + linear["ticks"])
    assert all(tick.endswith(" %") for tick in ratio["ticks"] + log["ticks"])
    assert "share" in ratio["title"] and back["title"] == first["title"]


@pytest.mark.browser
def test_the_heat_map_selector_and_the_table_sort_work(page: Path, tmp_path: Path) -> None:
    seen = ask(
        page,
        """{ const plot = document.getElementById('s0-heat0'), select = document.querySelector('[data-plot=s0-heat0]');
        const before = {z: plot.data[1].z, full: plot.data[0].z};
        select.value = 'random 0.05'; select.dispatchEvent(new Event('change'));
        await new Promise(done => setTimeout(done, 300));
        const table = document.querySelector('table'), click = i => table.querySelectorAll('th button')[i].click();
        const column = i => [...table.tBodies[0].rows].map(r => r.cells[i].dataset.v);
        click(2); const up = column(2); click(2); const down = column(2);
        return {before, after: plot.data[1].z, full: plot.data[0].z, title: plot.layout.annotations[1].text, up, down}; }""",
        tmp_path,
    )
    assert seen["before"]["full"] == seen["full"] == [[1.0, 1.0]] * 5
    assert seen["after"] != seen["before"]["z"]
    assert len(seen["after"]) == 5 and len(seen["after"][0]) == 2
    assert seen["title"] == "random 0.05"
    known = [float(v) for v in seen["up"] if v]
    assert known == sorted(known)
    assert seen["down"] == sorted(seen["up"], key=lambda v: float(v or "inf"), reverse=True)


STREAMED = ("full", "int8", "h2o", "streaming", "tova", "window", "random")


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a stream run with 22 points; its series files are gone once it is written."""
    folder = tmp_path_factory.mktemp("streams")
    return write_streams(folder, stream(folder, STREAMED, (0.1, 0.25, 0.5, 0.8)))


def test_curves_look_like_their_stack_and_hover_says_which_point_they_are(streams: Path) -> None:
    figures = content(streams)["figures"]
    known = {t["name"]: (t["marker"]["color"], t["marker"]["symbol"][0], t["line"]["dash"])
             for t in figures["s0-frontier"]["data"] if t["name"] != "frontier"}  # fmt: skip
    lines = {t["name"]: t for t in figures["s0-curves0"]["data"]}
    assert len(lines) == 2 + 5 * 4
    for line in lines.values():
        assert known[line["legendgroup"]] == (line["marker"]["color"], line["marker"]["symbol"][0], line["line"]["dash"])
    assert figures["s0-curves0"]["layout"]["yaxis"]["type"] == "log"
    about = lines["tova 0.25"]["hovertemplate"]
    assert len(about.removesuffix("<extra></extra>").split("<br>")) == 1 + 4 and "<b>tova 0.25</b>" in about
    (known,) = [text for text in content(streams)["points"]["about"] if "<b>tova 0.25</b>" in text]
    for part in ("budget fraction 0.25", "keep.scorer=tova", "keep.sinks=4", "top-1 agreement 90.5 %", "attention error 0.1"):
        assert part in known
    assert lines["tova 0.25"]["text"][1].startswith("positions 64–127: perplexity <b>")
    assert lines["tova 0.25"]["text"][1].endswith("n 192 tokens of 3 documents")


def test_stream_axes_and_columns_say_which_moment_they_are(streams: Path, page: Path) -> None:
    figures = content(streams)["figures"]
    assert figures["s0-frontier"]["layout"]["xaxis"]["title"]["text"].startswith("time mean of the KV bytes")
    assert "at the end of the stream" in figures["s0-bytes0"]["layout"]["xaxis"]["title"]["text"]
    assert figures["s0-frontier"]["layout"]["xaxis"]["title"]["text"] == content(streams)["titles"]["s0-frontier"]["bytes"]
    head = streams.read_text(encoding="utf-8").split("<thead>")[1].split("</thead>")[0]
    assert [name in head for name in ("KL to full", "top-1 agreement", "attention error", "KV bytes (time mean)")] == [True] * 4
    other = page.read_text(encoding="utf-8").split("<thead>")[1].split("</thead>")[0]
    assert "KL to full" not in other and "time mean" not in other
    assert "time mean" not in content(page)["figures"]["s0-frontier"]["layout"]["xaxis"]["title"]["text"]


def test_a_full_cache_at_chance_is_said_once_for_the_whole_page(tmp_path: Path, streams: Path) -> None:
    records = stream(tmp_path, ["full", "h2o"], [0.5]) + stream(tmp_path, ["full", "h2o"], [0.5], chance=2.0, task="short")
    text = write_streams(tmp_path, records).read_text(encoding="utf-8")
    assert text.count("<b>Not discriminative, 1 of 2 panels:</b>") == 1
    assert "smollm2 on short" in text.split("Not discriminative, 1 of 2")[1].split("</p>")[0]
    assert "Not discriminative, " not in streams.read_text(encoding="utf-8")


def test_missing_series_are_named_on_the_page(tmp_path: Path) -> None:
    records = stream(tmp_path, ["full", "h2o"], [0.5])
    (tmp_path / records[0]["series_path"]).unlink()
    text = write_streams(tmp_path, records).read_text(encoding="utf-8")
    assert "1 series file is missing; left out of the curves" in text
    for record in records[1:]:
        (tmp_path / record["series_path"]).unlink()
    assert "No curve to draw." in write_streams(tmp_path, records).read_text(encoding="utf-8")


def test_two_hundred_and_fifty_curves_stay_under_eight_megabytes(tmp_path: Path) -> None:
    stacks = ["full", *(f"stack-with-a-long-name-{i}" for i in range(50))]
    path = write_streams(tmp_path, stream(tmp_path, stacks, (0.05, 0.1, 0.2, 0.4, 0.8), documents=1, tokens=4096))
    assert len(content(path)["figures"]["s0-curves0"]["data"]) == 251
    assert path.stat().st_size < 8_000_000


@pytest.mark.browser
def test_the_budget_selector_keeps_many_curves_readable(streams: Path, tmp_path: Path) -> None:
    seen = ask(
        streams,
        """{ const plot = document.getElementById('s0-curves0'), select = document.querySelector('[data-lines=s0-curves0]');
        const legend = () => [...plot.querySelectorAll('.legendtext')].map(t => t.textContent);
        const pause = () => new Promise(done => setTimeout(done, 400));
        const choose = async value => { select.value = value; select.dispatchEvent(new Event('change')); await pause();
          return legend(); };
        const press = async value => { document.querySelector(`[data-plot=s0-curves0] [value=${value}]`).click(); await pause();
          return {y: plot.data[0].y[2], type: plot._fullLayout.yaxis.type, title: plot._fullLayout.yaxis.title.text,
            ticks: plot.layout.yaxis.ticktext}; };
        const out = {chosen: select.value, first: legend(), large: await choose('fraction 0.8'), all: await choose('all')};
        await choose('fraction 0.25');
        Plotly.Fx.hover(plot, [{curveNumber: plot.data.findIndex(t => t.name === 'h2o 0.25'), pointNumber: 2}]); await pause();
        out.hover = plot.querySelector('.hoverlayer').textContent;
        out.before = plot.data[0].y[2]; out.kl = await press('kl'); out.linear = await press('linear');
        out.back = await press('perplexity'); return out; }""",
        tmp_path,
    )
    assert seen["chosen"] == "fraction 0.25"
    assert seen["first"] == ["full", "h2o 0.25", "int8", "random 0.25", "streaming 0.25", "tova 0.25", "window 0.25"]
    assert seen["large"] == [name.replace("0.25", "0.8") for name in seen["first"]]
    assert len(seen["all"]) == 22
    for part in (
        "positions 128–191",
        "n 192 tokens",
        "h2o 0.25",
        "nats a token",
    ):
        assert part in seen["hover"]
    assert (seen["kl"]["type"], seen["linear"]["type"]) == ("log", "linear")
    assert "KL" in seen["kl"]["title"] and "perplexity" in seen["back"]["title"]
    assert all(float(tick.replace(",", "")) > 0 for tick in seen["kl"]["ticks"])
    assert seen["kl"]["y"] != seen["before"] == seen["back"]["y"]
