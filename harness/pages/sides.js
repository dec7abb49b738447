// two panels side by side: the points that both have, as a figure of one score against the other and as a table
function pairs(left, right) {
  const {panel, label} = store.points, known = new Map();
  panel.forEach((at, id) => { if (at === left) known.set(label[id], id); });
  return panel.map((at, id) => [known.get(label[id]), id]).filter(([one, id]) => one !== undefined && panel[id] === right);
}
function looksOf() {
  const found = new Map();
  for (const [name, figure] of Object.entries(store.figures)) if (name.endsWith('-frontier'))
    for (const {mode, meta, marker} of figure.data) if (mode === 'lines+markers')
      meta.ids.forEach((id, i) => found.set(id, [marker.color, marker.symbol[i]]));
  return found;
}
function number(value, digits = 4) { return value === null ? '–' : String(+value.toPrecision(digits)); }
function sidesTable(both) {
  const {score, bytes, full, label} = store.points, table = document.getElementById('sides-table');
  const share = id => bytes[id] === null || !full[id] ? null : bytes[id] / full[id];
  const heads = ['stack and point', 'left score', 'right score', 'right minus left', 'left of full', 'right of full'];
  const value = (v, text) => make('td', {'data-v': v ?? ''}, text);
  const percent = v => value(v, v === null ? '–' : number(100 * v, 3) + ' %');
  table.tHead.replaceChildren(make('tr', {}, ...heads.map((name, i) => {
    const button = make('button', {type: 'button'}, name); button.addEventListener('click', () => sortBy(button));
    return make('th', i ? {} : {class: 'l'}, button);
  })));
  table.tBodies[0].replaceChildren(...both.map(([one, other]) => {
    const known = score[one] !== null && score[other] !== null, change = known ? score[other] - score[one] : null;
    return make('tr', {}, make('td', {class: 'l'}, label[one]), value(score[one], number(score[one])), value(score[other], number(score[other])),
      value(change, known ? (change > 0 ? '+' : '') + number(change, 3) : '–'), percent(share(one)), percent(share(other)));
  }));
}
function sidesFigure(left, right, both) {
  const {score, low, high, label} = store.points, looks = looksOf(), dark = isDark();
  const pair = both.filter(ids => ids.every(id => score[id] !== null));
  const ends = (side, end) => pair.map(ids => end[ids[side]] === null ? 0 : Math.abs(end[ids[side]] - score[ids[side]]));
  const bars = side => ({type: 'data', symmetric: false, array: ends(side, high), arrayminus: ends(side, low), width: 0, thickness: 1,
    color: hue('#b6bdc6', dark)});
  const text = pair.map(([one, other]) => [label[one], number(score[one]), number(score[other])]);
  const trace = {type: 'scatter', mode: 'markers', x: pair.map(([one]) => score[one]), y: pair.map(([, other]) => score[other]),
    error_x: bars(0), error_y: bars(1), marker: {size: 10, color: pair.map(([, id]) => looks.get(id)?.[0] ?? '#0072B2'),
      symbol: pair.map(([, id]) => looks.get(id)?.[1] ?? 'circle'), line: {width: 0.6, color: hue('#1b1f24', dark)}},
    customdata: text.map(row => row.map(plainly)), hovertemplate: '<b>%{customdata[0]}</b><br>left %{customdata[1]}, right %{customdata[2]}<extra></extra>',
    meta: {ids: pair.map(([, id]) => id)}};
  const first = Object.values(store.figures).find(figure => figure.layout.xaxis?.gridcolor).layout;
  const axis = (side, panel) => ({...structuredClone(first.xaxis), type: panel.higher ? 'linear' : 'log', tickmode: 'auto', domain: [0, 1],
    anchor: undefined, matches: undefined, title: {text: `${side}: ${plainly(panel.metric)}, ${plainly(panel.title)}`, font: {size: 12}}});
  const [one, other] = [store.panels[left], store.panels[right]];
  const layout = {...structuredClone({font: first.font, paper_bgcolor: first.paper_bgcolor, plot_bgcolor: first.plot_bgcolor,
    hoverlabel: first.hoverlabel, template: first.template}), height: 480, margin: {l: 72, r: 16, t: 16, b: 60}, showlegend: false,
    hovermode: 'closest', xaxis: axis('left', one), yaxis: axis('right', other), shapes: []};
  const all = [...trace.x, ...trace.y].filter(v => v !== null && (one.higher || v > 0)), least = Math.min(...all), most = Math.max(...all);
  layout.shapes = [{type: 'line', x0: least, y0: least, x1: most, y1: most, layer: 'below',
    line: {color: hue('#6b7280', dark), width: 1.2, dash: 'dot'}}];
  return [[trace], layout];
}
// a name as Plotly's small HTML shows it: as it is
function plainly(text) {
  return text.replace(/[&<>"']/g, mark => `&#${mark.charCodeAt(0)};`).replaceAll('%{', '%&#123;');
}
// only scores of one task in one unit are beside each other on a line
function comparable(left, right) {
  const [one, other] = [store.panels[left], store.panels[right]];
  return left !== right && one.task === other.task && one.metric === other.metric;
}
function unlike(left, right) {
  const [one, other] = [left, right].map(side => `${store.panels[side].task} (${store.panels[side].metric})`);
  return left === right ? 'The same run twice: choose another one.' : `${one} and ${other} are not compared: choose two runs of one task and metric.`;
}
function showSides() {
  const [left, right] = ['left', 'right'].map(side => +document.querySelector(`[data-side=${side}]`).value);
  const plot = document.getElementById('sides-plot'), alike = comparable(left, right), both = alike ? pairs(left, right) : [];
  const better = `${store.panels[left].higher ? 'above' : 'below'} the dotted line the right one does better`;
  document.getElementById('sides-note').textContent = !alike ? unlike(left, right) : !both.length ? 'They have no point in common.'
    : `${both.length} points of the same stack at the same budget; ${better}. Intervals are those of each by itself.`;
  plot.hidden = document.getElementById('sides-table').hidden = !both.length;
  if (!both.length) return null;
  sidesTable(both);
  const [data, layout] = sidesFigure(left, right, both);
  return Plotly.newPlot(plot, data, layout, configOf()).then(() => { plot.on('plotly_click', event => pick(idOf(event.points[0]))); });
}
function wireSides() {
  const card = document.getElementById('sides');
  if (!card) return;
  const selects = [...card.querySelectorAll('select')];
  for (const select of selects) {
    store.panels.forEach((panel, i) => select.append(make('option', {value: i}, panel.title)));
    select.addEventListener('change', showSides);
  }
  const places = store.panels.map((_, i) => i), left = places.find(i => places.some(other => comparable(i, other))) ?? 0;
  selects[0].selectedIndex = left;
  selects[1].selectedIndex = places.find(i => comparable(left, i)) ?? Math.min(1, places.length - 1);
  card.addEventListener('toggle', () => { if (card.open && !document.querySelector('#sides-plot.js-plotly-plot')) showSides(); });
}
