"""The frame of a page: styles, the script that draws and switches, and Plotly itself, once; it knows no points.

Nothing is fetched: the content security policy of the page forbids the browser any address outside the file.
"""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from harness.run.dashboard_style import FONT

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:"

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:#f4f6f8;color:#1b1f24;font:15px/1.5 FONT;-webkit-font-smoothing:antialiased}
main{max-width:1360px;margin:0 auto;padding:36px 28px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.015em}
h2{font-size:22px;margin:44px 0 2px;letter-spacing:-.01em} h3{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px} .quiet{color:#5b6470;font-size:14px} .small{font-size:13px}
.card{background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:18px 20px;margin:14px 0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:14px;margin:14px 0}
.facts .card{margin:0} .facts b.big{display:block;font-size:19px;line-height:1.3;overflow-wrap:anywhere}
.head{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;justify-content:space-between}
.switches{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center;font-size:13px;color:#5b6470}
.switch{display:inline-flex;border:1px solid #c9d0d8;border-radius:7px;overflow:hidden}
.switch button{font:inherit;color:#1b1f24;background:#fff;border:0;padding:4px 12px;cursor:pointer}
.switch button+button{border-left:1px solid #c9d0d8} .switch button[aria-pressed=true]{background:#1b1f24;color:#fff}
.switch button:focus-visible,select:focus-visible,th button:focus-visible{outline:2px solid #0072B2;outline-offset:-2px}
select{font:inherit;font-size:14px;padding:4px 8px;border:1px solid #c9d0d8;border-radius:7px;background:#fff}
.scroll{max-height:600px;overflow:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid #edf0f3}
.l{text-align:left} td:last-child{white-space:normal;min-width:220px}
th{position:sticky;top:0;background:#fff;z-index:1;padding:0;border-bottom:1px solid #c9d0d8}
th button{font:inherit;font-weight:600;border:0;background:none;padding:7px 10px;cursor:pointer;width:100%}
th button{text-align:inherit} tr.front td{font-weight:600} tr.base td{background:#f6f7f9}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px}
dt{color:#5b6470} dd{margin:0;overflow-wrap:anywhere} ul{margin:6px 0 0;padding-left:20px} summary{cursor:pointer}
.warn{border-left:4px solid #D55E00} .js-plotly-plot{width:100%} .js-plotly-plot .main-svg{overflow:visible!important}
@media print{body{background:#fff}.card{break-inside:avoid}.switches{display:none}.scroll{max-height:none}}
"""

_JS = """
const store = JSON.parse(document.getElementById('content').textContent);
const settings = {responsive: true, displaylogo: false, toImageButtonOptions: {scale: 2}, plotlyServerURL: '',
  modeBarButtonsToRemove: ['lasso2d', 'select2d', 'autoScale2d', 'sendChartToCloud', 'sendDataToCloud']};
function iec(v) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0; while (Math.abs(v) >= 1024 && i < 4) { v /= 1024; i += 1; }
  return (i ? +v.toPrecision(3) : Math.round(v)) + ' ' + units[i];
}
function steps(lo, hi, step) {
  const out = []; for (let v = Math.ceil(lo / step) * step; v <= hi * 1.0000001; v += step) out.push(v); return out;
}
function tickValues(lo, hi, log, unit) {
  if (unit === 'bytes') {
    const octaves = Math.log2(hi / Math.max(lo, 1));
    if (log && octaves > 2.5) return steps(Math.log2(lo), Math.log2(hi), Math.ceil(octaves / 8)).map(e => 2 ** e);
    return steps(lo, hi, 2 ** Math.ceil(Math.log2((hi - lo) / 7)));
  }
  if (log && hi / lo > 4) {
    const out = [];
    for (let e = Math.floor(Math.log10(lo)); e <= Math.log10(hi); e += 1)
      for (const m of hi / lo > 5000 ? [1] : [1, 2, 5]) { const v = m * 10 ** e; if (v >= lo && v <= hi) out.push(v); }
    return out;
  }
  const raw = (hi - lo) / 7, size = 10 ** Math.floor(Math.log10(raw));
  return steps(lo, hi, size * [1, 2, 5, 10].find(m => m * size >= raw));
}
function retick(plot) {
  const unit = plot.dataset.unit, changes = {};
  for (const name of unit === 'tokens' ? [] : axesOf(plot, 'x')) {
    const axis = plot._fullLayout[name], log = axis.type === 'log';
    const [lo, hi] = log ? axis.range.map(e => 10 ** e) : axis.range;
    const values = tickValues(lo, hi, log, unit);
    changes[name + '.tickvals'] = values;
    changes[name + '.ticktext'] = values.map(v => unit === 'bytes' ? iec(v) : +(100 * v).toPrecision(3) + ' %');
  }
  for (const name of axesOf(plot, 'y')) {
    const axis = plot._fullLayout[name], log = axis.type === 'log';
    changes[name + '.tickmode'] = log ? 'array' : 'auto';
    if (!log) continue;
    const values = tickValues(10 ** axis.range[0], 10 ** axis.range[1], true, 'score');
    changes[name + '.tickvals'] = values;
    changes[name + '.ticktext'] = values.map(v => +v.toPrecision(4)).map(
      v => v < 0.01 ? v.toExponential() : v.toLocaleString('en'));
  }
  return Plotly.relayout(plot, changes);
}
function axesOf(plot, letter) {
  return Object.keys(plot._fullLayout).filter(key => new RegExp('^' + letter + 'axis[0-9]*$').test(key));
}
const actions = {
  unit(plot, unit) {
    plot.dataset.unit = unit;
    const index = plot.data.map((trace, i) => i).filter(i => plot.data[i].meta);
    const layout = {};
    for (const axis of axesOf(plot, 'x')) {
      layout[axis + '.title.text'] = store.titles[plot.id][unit]; layout[axis + '.autorange'] = true;
    }
    return Plotly.update(plot, {x: index.map(i => plot.data[i].meta[unit])}, layout, index);
  },
  measure(plot, name) {
    return Plotly.update(plot, {y: plot.data.map(trace => trace.meta[name])},
      {'yaxis.title.text': store.titles[plot.id][name], 'yaxis.autorange': true});
  },
  xscale(plot, type) {
    return Plotly.relayout(plot, Object.fromEntries(axesOf(plot, 'x').flatMap(
      axis => [[axis + '.type', type], [axis + '.autorange', true]])));
  },
  yscale(plot, type) {
    return Plotly.relayout(plot, Object.fromEntries(axesOf(plot, 'y').flatMap(
      axis => [[axis + '.type', type], [axis + '.autorange', true]])));
  },
};
function wire(group) {
  const plot = document.getElementById(group.dataset.plot);
  for (const button of group.querySelectorAll('button')) button.addEventListener('click', () => {
    for (const other of group.querySelectorAll('button')) other.setAttribute('aria-pressed', String(other === button));
    actions[group.dataset.action](plot, button.value).then(() => retick(plot));
  });
}
function wireHeat(select) {
  const plot = document.getElementById(select.dataset.plot), content = store.heat[select.dataset.plot];
  select.addEventListener('change', () => {
    const chosen = content[select.value];
    Plotly.update(plot, {z: [chosen.z], text: [chosen.text], customdata: [chosen.customdata]},
      {'annotations[1].text': select.value}, [1]);
  });
}
function wireLines(select) {
  const plot = document.getElementById(select.dataset.lines);
  select.addEventListener('change', () => Plotly.update(plot,
    {visible: store.shown[plot.id][select.value]}, {'yaxis.autorange': true}).then(() => retick(plot)));
}
function sortBy(button) {
  const head = button.parentElement, body = head.closest('table').tBodies[0], i = head.cellIndex;
  const up = head.getAttribute('aria-sort') !== 'ascending';
  for (const other of head.parentElement.children) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const value = row => { const cell = row.cells[i];
    return 'v' in cell.dataset ? (cell.dataset.v === '' ? Infinity : +cell.dataset.v) : cell.textContent; };
  const order = (a, b) => { const x = value(a), y = value(b);
    return typeof x === 'number' ? x - y || 0 : x.localeCompare(y, 'en', {numeric: true}); };
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
}
window.ready = Promise.all(Object.entries(store.figures).map(([id, figure]) => {
  const plot = document.getElementById(id);
  for (const trace of figure.data)
    if (trace.customdata && trace.type !== 'heatmap')
      trace.customdata = trace.customdata.map(numbers => numbers.map(n => store.lines[n]).join('<br>'));
  return Plotly.newPlot(plot, figure.data, figure.layout, settings).then(() => {
    if (!plot.dataset.unit) return null;
    let busy = false;
    plot.on('plotly_relayout', change => {
      if (busy || !Object.keys(change).some(key => /^[xy]axis[0-9]*[.](range|autorange)/.test(key))) return;
      busy = true; retick(plot).then(() => { busy = false; });
    });
    return retick(plot);
  });
})).then(() => {
  document.querySelectorAll('.switch').forEach(wire);
  document.querySelectorAll('select[data-plot]').forEach(wireHeat);
  document.querySelectorAll('select[data-lines]').forEach(wireLines);
  document.querySelectorAll('th button').forEach(b => b.addEventListener('click', () => sortBy(b)));
  document.body.dataset.ready = 'yes';
});
"""


def render(title: str, body: str, content: dict[str, Any]) -> str:
    """The whole page: `body` is HTML, `content` holds by element id figures, heat maps, axis titles, visible lines."""
    content = content | {"lines": _share_lines(content["figures"])}
    data = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{escape(title)}</title>'
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_CSS.replace('FONT', FONT)}</style></head><body><main>{body}</main>",
            f'<script id="content" type="application/json">{data}</script>',
            f"<script>{get_plotlyjs()}</script><script>{_JS}</script></body></html>",
        ]
    )


def _plain(value: Any) -> Any:
    """Numbers that strict JSON cannot hold become null: nothing is drawn there, and the page lists them elsewhere."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _share_lines(figures: dict[str, Any]) -> list[str]:
    """Replace hover texts by numbers of their lines, which many points have in common; returns the lines."""
    lines: dict[str, int] = {}
    for trace in (trace for figure in figures.values() for trace in figure["data"]):
        texts = trace.get("customdata", [])
        if len(texts) and isinstance(texts[0], str):
            trace["customdata"] = [[lines.setdefault(line, len(lines)) for line in text.split("<br>")] for text in texts]
    return list(lines)


def switch(plot: str, action: str, options: dict[str, str]) -> str:
    """A row of buttons of which one is pressed, the first to begin with; `options` maps values to names."""
    buttons = "".join(
        f'<button type="button" value="{escape(value)}" aria-pressed="{str(i == 0).lower()}">{escape(name)}</button>'
        for i, (value, name) in enumerate(options.items())
    )
    return f'<span class="switch" role="group" data-plot="{plot}" data-action="{action}">{buttons}</span>'
