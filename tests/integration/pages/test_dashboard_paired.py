"""The paired view of the frontier in a real browser: its numbers, what opens in it, and what lies beyond its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.analysis.findings import findings
from harness.analysis.points import points
from harness.pages import dashboard
from tests.support.browser import ask, content
from tests.support.record_factory import sweep
from tests.support.stream_factory import stream, write_streams

STATE = """
const pause = () => new Promise(done => setTimeout(done, 500));
const press = async (plot, value) => {
  document.querySelector(`[data-plot=${plot.id}] [value=${value}]`).click(); await pause(); return state(plot); };
const state = plot => ({
  y: Object.fromEntries(plot.data.filter(t => t.mode === 'lines+markers').map(t => [t.name, [...t.y]])),
  bars: Object.fromEntries(plot.data.filter(t => t.mode === 'lines+markers').map(
    t => [t.name, [[...t.error_y.array], [...t.error_y.arrayminus]]])),
  front: [...plot.data.find(t => t.name === 'frontier').y],
  edge: plot.data.filter(t => t.mode === 'markers+text').flatMap(t => [...t.y]),
  x: plot.data.find(t => t.name === 'h2o').x[0], xtype: plot._fullLayout.xaxis.type,
  title: plot._fullLayout.yaxis.title.text, type: plot._fullLayout.yaxis.type, range: [...plot._fullLayout.yaxis.range],
  shapes: plot.layout.shapes.map(s => [s.type, s.y0, s.y1]),
  scale: [...document.querySelectorAll(`[data-plot=${plot.id}][data-action=yscale]`)].map(s => s.getClientRects().length > 0),
  note: [...document.querySelectorAll(`[data-of=${plot.id}]`)].filter(p => !p.hidden).map(p => p.textContent).join(' ')});
"""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    """A stream with a broken stack, and one point that read other documents than the full cache."""
    folder = tmp_path_factory.mktemp("paired")
    records = stream(folder, ["full", "int8", "h2o", "tova", "window", "random", "int1"], (0.1, 0.25, 0.5))
    for record in records:
        record["score"] += 5.0 if record["stack"] == "int1" else 0.0
    records += stream(folder, ["tova"], [0.3], prompt_sha256="elsewhere")
    return write_streams(folder, records), points(records).set_index("label")


@pytest.mark.browser
def test_a_stream_opens_in_nats_and_the_switch_goes_there_and_back(streamed: tuple[Path, pd.DataFrame], tmp_path: Path) -> None:
    page, known = streamed
    first, zoomed, home, score, linear, again, other = ask(
        page,
        f"""{{ {STATE} const plot = document.getElementById('s0-frontier'), out = [state(plot)];
        await Plotly.relayout(plot, {{'yaxis.autorange': true}}); await pause(); out.push(state(plot));
        await Plotly.relayout(plot, {{'yaxis.range': [0, 0.01]}}); await pause();
        plot.querySelector('[data-title="Reset axes"]').click(); await pause(); out.push(state(plot));
        out.push(await press(plot, 'score'), await press(plot, 'linear'));
        await press(plot, 'ratio'); out.push(await press(plot, 'paired'), await press(plot, 'score')); return out; }}""",
        tmp_path,
    )
    rows = [f"h2o {budget}" for budget in (0.1, 0.25, 0.5)]
    assert first["y"]["h2o"] == pytest.approx(known.loc[rows, "nll_diff"].tolist())
    up, down = first["bars"]["h2o"]
    assert up == pytest.approx((known["nll_diff_hi"] - known["nll_diff"])[rows].tolist())
    assert down == pytest.approx((known["nll_diff"] - known["nll_diff_lo"])[rows].tolist())
    assert first["y"]["full"] == [0.0] and first["bars"]["full"] == [[0.0], [0.0]]
    assert first["y"]["tova"][2] is None and None not in [first["y"]["tova"][i] for i in (0, 1, 3)]
    assert first["title"] == "nats a token above the full cache (lower is better)"
    assert (first["type"], first["scale"], first["shapes"]) == ("linear", [False], [["line", 0, 0]])

    # one broken point lies beyond: a marker at the edge, a line in the note; both truthful when the user zooms out
    assert first["range"][1] < 0.3 < 4.9 < known.loc["int1", "nll_diff"] < zoomed["range"][1]
    assert len(first["edge"]) == 1 and first["range"][0] < first["edge"][0] < first["range"][1]
    assert zoomed["edge"] == [None]
    assert (home["range"], home["edge"]) == (first["range"], first["edge"])
    assert "1 point lies above the range" in first["note"] and "int1 +5.0" in first["note"]
    assert "1 point has no paired difference" in first["note"]
    assert "tova 0.3 (the full cache was scored on 0 of these 3 prompts" in first["note"]

    assert score["y"]["h2o"] == pytest.approx(known.loc[rows, "score"].tolist())
    assert (score["type"], score["scale"], score["edge"]) == ("log", [True], [None])
    assert "perplexity" in score["title"] and "above the range" not in score["note"]
    assert sorted(kind for kind, *_ in score["shapes"]) == ["line", "rect"]
    assert (linear["xtype"], again["xtype"], other["xtype"]) == ("linear", "linear", "linear")
    assert again["x"] == other["x"] < 1 < first["x"]
    assert (again["y"], again["bars"], again["range"]) == (first["y"], first["bars"], first["range"])
    assert other["y"] == score["y"] and other["bars"] == score["bars"]
    assert len(first["front"]) == len(score["front"])


@pytest.mark.browser
def test_other_tasks_open_with_scores_and_show_differences_of_them(tmp_path: Path) -> None:
    records = sweep(repeats=2) + sweep(query_aware=True, repeats=2)
    page = tmp_path / "dashboard.html"
    dashboard.write(findings(records), page)
    seen: list[dict[str, Any]] = ask(
        page,
        f"""{{ {STATE} const plot = document.getElementById('s0-frontier'); const one = state(plot);
        return [one, await press(plot, 'paired'), await press(plot, 'score')]; }}""",
        tmp_path,
    )
    score, paired, back = seen
    known = points(records)
    aware = known[known["query_aware"] & (known["stack"] == "h2o")].sort_values("bytes_context")
    assert score["y"]["h2o"] == pytest.approx(aware["score"].tolist(), rel=1e-4)  # the panel drawn last
    assert paired["y"]["h2o"] == pytest.approx(aware["diff_to_full"].tolist(), rel=1e-4)
    assert paired["bars"]["h2o"][1] == pytest.approx((aware["diff_to_full"] - aware["diff_lo"]).tolist(), rel=1e-4)
    assert "contains minus that of the full cache (higher is better)" == paired["title"]
    assert paired["range"][0] <= known["diff_lo"].min() and paired["range"][1] >= 0 and paired["edge"] == []
    assert (score["range"], back["range"]) == ([-0.03, 1.04], [-0.03, 1.04])
    assert back == score
    assert "above the range" not in paired["note"] and "no paired difference" not in paired["note"]


def test_hover_of_a_stream_has_the_difference_in_nats(streamed: tuple[Path, pd.DataFrame]) -> None:
    figure = content(streamed[0])["figures"]["s0-frontier"]
    texts = [text for trace in figure["data"] if trace["name"] == "int1" for text in trace["customdata"]]
    assert len(texts) == 2 and texts[0] == texts[1]  # the point and its marker at the edge
    assert "+5.0 [" in texts[0] and "] nats a token" in texts[0]
