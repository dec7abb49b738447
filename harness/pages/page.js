const store = JSON.parse(document.getElementById('content').textContent);
// what stands several times in a page is sent once: long lists, and the lines of hover texts
function unpack(value) {
  if (value === null || typeof value !== 'object') return value;
  if (Array.isArray(value)) return value.map(unpack);
  if ('@' in value) return 'n' in value ? Array(value.n).fill(value['@']) : store.lists[value['@']].slice();
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, unpack(one)]));
}
function hoverText(n) {
  return store.texts[n].map(line => store.lines[line].map(part => store.parts[part]).join('')).join('<br>');
}
function cell(number) {
  const code = store.cells[number], kind = code[0], rest = code.slice(1), at = rest.indexOf('|');
  if (kind === 'v') return `<td data-v="${rest.slice(0, at)}">${rest.slice(at + 1)}</td>`;
  return `<td class=l${kind === 't' ? ' data-tip' : ''}>${rest}</td>`;
}
function fillTable(id, rows) {
  document.getElementById(id).tBodies[0].innerHTML = rows.map(
    ([kind, ...cells]) => `<tr class="${store.cells[kind]}">${cells.map(cell).join('')}</tr>`).join('');
}
store.figures = unpack(store.figures);
Object.entries(store.tables).forEach(([id, rows]) => fillTable(id, rows));
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
// y of the traces, score axis and lines of the view a plot is in; nothing for a plot without views
function dress(plot, figure) {
  const name = plot.dataset.view;
  if (!name) return figure;
  const view = store.views[plot.id][name];
  const scale = document.querySelector(`[data-plot="${plot.id}"][data-action=yscale] [aria-pressed=true]`);
  for (const trace of figure.data) {
    trace.meta.score ??= {y: trace.y, bars: {...trace.error_y}};
    const own = trace.meta[name];
    trace.y = own.y;
    if (trace.error_y) Object.assign(trace.error_y, own.bars);
  }
  for (const key of Object.keys(figure.layout).filter(key => /^yaxis[0-9]*$/.test(key))) {
    const axis = figure.layout[key];
    axis.type = name === 'score' && scale ? scale.value : view.type;
    axis.autorange = !view.range;
    if (view.range) axis.range = [...view.range]; else delete axis.range;
    if (axis.title && axis.title.text) axis.title.text = view.title;
  }
  figure.layout.shapes = view.shapes;
  return figure;
}
// markers at the edge show points beyond the default range, so they go when the user leaves it
function edge(plot) {
  if (plot.dataset.view !== 'paired') return null;
  const index = plot.data.map((trace, i) => i).filter(i => plot.data[i].meta.edge);
  const range = store.views[plot.id].paired.range, now = plot._fullLayout.yaxis.range;
  const home = range.every((end, i) => Math.abs(end - now[i]) < 1e-6 * (range[1] - range[0]));
  if (!index.length || home === (plot.data[index[0]].y[0] !== null)) return null;
  return Plotly.restyle(plot, {y: index.map(i => plot.data[i].meta.paired.y.map(y => home ? y : null))}, index);
}
// a new plot, so that a double click and the home button know the ranges of the view
function draw(plot, figure) {
  const {data, layout} = dress(plot, figure);
  return Plotly.newPlot(plot, data, layout, settings).then(() => {
    if (!plot.dataset.unit) return null;
    let busy = false;
    plot.on('plotly_relayout', change => {
      if (busy || !Object.keys(change).some(key => /^[xy]axis[0-9]*[.](range|autorange)/.test(key))) return;
      busy = true; retick(plot).then(() => edge(plot)).then(() => { busy = false; });
    });
    return retick(plot);
  });
}
const actions = {
  view(plot, name) {
    plot.dataset.view = name;
    for (const part of document.querySelectorAll(`[data-of="${plot.id}"]`)) part.hidden = part.dataset.in !== name;
    for (const axis of axesOf(plot, 'x')) plot.layout[axis].autorange = true;
    return draw(plot, {data: plot.data, layout: plot.layout});
  },
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
    for (const trace of plot.data) trace.meta.perplexity ??= trace.y;  // what it is drawn with at first
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
    const chosen = content[select.selectedIndex], texts = chosen.customdata.map(row => row.map(hoverText));
    Plotly.update(plot, {z: [chosen.z], text: [chosen.text], customdata: [texts],
      hovertemplate: [`<b>${chosen.label}</b><br>%{customdata}<extra></extra>`]},
      {'annotations[1].text': chosen.label}, [1]);
  });
}
function wireLines(select) {
  const plot = document.getElementById(select.dataset.lines);
  select.addEventListener('change', () => Plotly.update(plot,
    {visible: store.shown[plot.id][select.selectedIndex]}, {'yaxis.autorange': true}).then(() => retick(plot)));
}
function wireRows(select) {
  const plot = document.getElementById(select.dataset.rows), whole = store.figures[plot.id];
  select.addEventListener('change', () => {
    const [from, to] = store.windows[plot.id][select.selectedIndex];
    const height = plot.layout.height + (to - from - plot.data[0].y.length) * 21;
    const layout = {...plot.layout, height, yaxis: {...plot.layout.yaxis, range: [-0.7, to - from - 0.3]},
      xaxis: {...plot.layout.xaxis, autorange: true}};
    Plotly.react(plot, whole.data.map(trace => cut(trace, from, to)), layout, settings).then(() => retick(plot));
  });
}
function cut(trace, from, to) {
  const part = {...trace, x: trace.x.slice(from, to), y: trace.y.slice(from, to), customdata: trace.customdata.slice(from, to)};
  if (Array.isArray(trace.text)) part.text = trace.text.slice(from, to);
  if (Array.isArray(trace.marker.symbol)) part.marker = {...trace.marker,
    symbol: trace.marker.symbol.slice(from, to), color: trace.marker.color.slice(from, to)};
  return part;
}
// a verdict says on hover what the glossary of the page says of it
function explain() {
  const known = new Map([...document.querySelectorAll('#labels tbody tr')].map(row => [row.cells[1].textContent,
    `${row.cells[1].textContent}: ${row.cells[2].textContent}. Trust it? ${row.cells[3].textContent}.`]));
  for (const cell of document.querySelectorAll('[data-tip]')) cell.title = known.get(cell.textContent) ?? '';
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
    if (trace.type === 'bar') trace.customdata = trace.x.map(iec);
    else if (trace.customdata) trace.customdata = trace.customdata.map(n => Array.isArray(n) ? n.map(hoverText) : hoverText(n));
  const [from, to] = (store.windows[id] ?? [[]])[0];
  return draw(plot, to === undefined ? figure : {...figure, data: figure.data.map(trace => cut(trace, from, to))});
})).then(() => {
  document.querySelectorAll('.switch').forEach(wire);
  document.querySelectorAll('select[data-plot]').forEach(wireHeat);
  document.querySelectorAll('select[data-lines]').forEach(wireLines);
  document.querySelectorAll('select[data-rows]').forEach(wireRows);
  explain();
  document.querySelectorAll('th button').forEach(b => b.addEventListener('click', () => sortBy(b)));
  document.body.dataset.ready = 'yes';
});
