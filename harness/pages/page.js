// draws the figures of a page and wires what switches them
const settings = {responsive: true, displaylogo: false, plotlyServerURL: '',
  modeBarButtonsToRemove: ['lasso2d', 'select2d', 'autoScale2d', 'sendChartToCloud', 'sendDataToCloud', 'toImage']};
function configOf() { return {...settings, modeBarButtonsToAdd: [['png', Plotly.Icons.camera], ['svg', Plotly.Icons.disk]].map(
  ([format, icon]) => ({name: format, title: `Download with its title, as ${format.toUpperCase()}`, icon,
    click: plot => takeImage(plot, format)}))};
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
  return Plotly.relayout(plot, changes).then(() => { if (isNamed(plot)) showNames(plot); });
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
  fold(plot, data, layout); sieve(plot, data);
  return Plotly.newPlot(plot, data, layout, configOf()).then(() => {
    if (store.points) plot.on('plotly_click', event => choose(plot, event));
    if (!plot.dataset.unit) return null;
    let busy = false;
    if (isNamed(plot)) plot.on('plotly_restyle', ([change]) => { if ('visible' in change) retick(plot); });
    plot.on('plotly_relayout', change => {
      if (busy || !Object.keys(change).some(key => /^([xy]axis[0-9]*[.](range|autorange)|autosize)/.test(key))) return;
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
    for (const axis of axesOf(plot, 'x')) Object.assign(plot.layout[axis], {autorange: true,
      title: {...plot.layout[axis].title, text: lined(store.titles[plot.id][unit])}});
    sieve(plot, plot.data);
    return Plotly.redraw(plot);
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
    actions[group.dataset.action](plot, button.value).then(() => retick(plot)).then(ring);
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
// lines of the chosen budget that the filters let through
function showLines(plot) {
  const select = document.querySelector(`[data-lines="${plot.id}"]`), shown = store.shown[plot.id][select.selectedIndex];
  const visible = plot.data.map((trace, i) => shown[i] && isOn(trace.meta.id));
  return Plotly.update(plot, {visible}, {'yaxis.autorange': true}).then(() => retick(plot));
}
function wireLines(select) { select.addEventListener('change', () => showLines(document.getElementById(select.dataset.lines))); }
// the bars of the chosen window; under a filter the fewest bytes of what it lets through
const MOST_BARS = 60;
function showRows(plot) {
  const whole = store.figures[plot.id], select = document.querySelector(`[data-rows="${plot.id}"]`);
  const ids = whole.data.at(-1).meta.ids, [from, to] = store.windows[plot.id]?.[select.selectedIndex] ?? [0, ids.length];
  const places = ids.map((id, i) => i), rows = passing === null ? places.slice(from, to) : places.filter(i => isOn(ids[i])).slice(-MOST_BARS);
  const height = plot.layout.height + (rows.length - plot.data[0].y.length) * 21;
  const layout = {...plot.layout, height, yaxis: {...plot.layout.yaxis, range: [-0.7, rows.length - 0.3]},
    xaxis: {...plot.layout.xaxis, autorange: true}};
  return Plotly.react(plot, whole.data.map(trace => take(trace, rows)), layout, configOf()).then(() => retick(plot));
}
function wireRows(select) { select.addEventListener('change', () => showRows(document.getElementById(select.dataset.rows))); }
function take(trace, rows) {
  const of = list => rows.map(i => list[i]);
  const part = {...trace, x: of(trace.x), y: of(trace.y), customdata: of(trace.customdata)};
  if (Array.isArray(trace.text)) part.text = of(trace.text);
  if (trace.type === 'bar') part.showlegend = part.x.some(size => size > 0);
  if (trace.meta) part.meta = {...trace.meta, ids: of(trace.meta.ids)};
  if (Array.isArray(trace.marker.symbol)) part.marker = {...trace.marker, symbol: of(trace.marker.symbol), color: of(trace.marker.color)};
  return part;
}
Object.entries(store.tables ?? {}).forEach(([id, rows]) => fillTable(id, rows));
painted = isDark();
if (painted) { dye(store.figures, true); dye(store.views ?? {}, true); }
window.ready = Promise.all(Object.entries(store.figures).map(([id, figure]) => {
  const plot = document.getElementById(id);
  for (const trace of figure.data)
    if (trace.type === 'bar') trace.customdata = trace.x.map(iec);
    else if (trace.customdata) trace.customdata = trace.customdata.map(n => Array.isArray(n) ? n.map(hoverText) : hoverText(n));
  const [from, to] = (store.windows[id] ?? [[]])[0];
  const rows = to === undefined ? null : Array.from({length: to - from}, (_, i) => from + i);
  return draw(plot, rows ? {...figure, data: figure.data.map(trace => take(trace, rows))} : figure);
})).then(() => {
  document.querySelectorAll('.switch').forEach(wire);
  document.querySelectorAll('select[data-plot]').forEach(wireHeat);
  document.querySelectorAll('select[data-lines]').forEach(wireLines);
  document.querySelectorAll('select[data-rows]').forEach(wireRows);
  wireTheme(); wireTables(); wireFilters(); wireDetail(); wireSides(); wireFold();
  document.body.dataset.ready = 'yes';
});
