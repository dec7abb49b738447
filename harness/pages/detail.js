// all that is known of one point, in a panel beside the page, and the marks that say which point it is
let picked = null, opener = null;
function panelOf(id) { return store.panels[store.points.panel[id]]; }
function commandOf(id) {
  const {run, stack, point} = store.points;
  return [run, stack, point].map(part => part.names[part.of[id]]).filter(Boolean).join(' ');
}
function part(title, ...children) { return make('section', {}, make('h3', {}, title), ...children); }
function commandPart(id) {
  const text = commandOf(id), button = make('button', {type: 'button', class: 'copy'}, 'Copy');
  button.addEventListener('click', () => copy(text, button));
  const {stack} = store.points, alone = stack.names[stack.of[id]] !== '';
  const note = alone ? '' : 'Of the whole run: its manifest does not say how this changed stack was asked for.';
  return part('Run it again', make('pre', {class: 'command'}, text), button, make('p', {class: 'quiet small'}, note));
}
// (kind, colour, bytes) of a point, as the figure of bytes has them
function kindsOf(id) {
  for (const [name, figure] of Object.entries(store.figures)) {
    if (!name.includes('-bytes')) continue;
    const i = figure.data.at(-1).meta.ids.indexOf(id);
    if (i >= 0) return figure.data.filter(trace => trace.type === 'bar').map(trace => [trace.name, trace.marker.color, trace.x[i]]);
  }
  return [];
}
function whole(kinds) { return kinds.reduce((sum, kind) => sum + kind[2], 0); }
// all at one moment, the full cache too: that of the figure of bytes
function bytesPart(id) {
  const {label, panel} = store.points, full = label.findIndex((name, one) => name === 'full' && panel[one] === panel[id]);
  const kinds = kindsOf(id).filter(kind => kind[2] > 0), known = whole(full < 0 ? [] : kindsOf(full)), base = known || whole(kinds);
  const bars = make('div', {class: 'bars'});
  for (const [name, colour, size] of kinds) {
    const bar = make('i'), share = 100 * size / base; bar.style.width = `${Math.min(Math.max(share, 0.5), 100)}%`;
    bar.style.background = colour;
    bars.append(make('span', {}, name), make('div', {}, bar), make('span', {class: 'r'}, `${iec(size)}, ${+share.toPrecision(3)} %`));
  }
  const when = panelOf(id).stream ? ' at the end of the stream' : '';
  const note = kinds.length ? `bars are shares of ${known ? `the full cache${when}` : `its own bytes${when}`}, ${iec(base)}` : '';
  return part('What its bytes are', kinds.length ? bars : make('p', {class: 'quiet'}, 'not known'), make('p', {class: 'quiet small'}, note));
}
function small(figure, traces, height) {
  const div = make('div');
  const layout = {...structuredClone(figure.layout), height, margin: {l: 76, r: 8, t: 8, b: 44}, showlegend: false, annotations: []};
  for (const key of Object.keys(layout)) if (/^[xy]axis[0-9]+$/.test(key)) delete layout[key];
  layout.xaxis.domain = [0, 1]; delete layout.xaxis.matches; delete layout.yaxis.matches;
  return [div, () => Plotly.newPlot(div, traces, layout, {...settings, displayModeBar: false})];
}
function mapPart(id) {
  for (const [name, ids] of Object.entries(store.maps ?? {})) {
    const i = ids.indexOf(id);
    if (i < 0) continue;
    const figure = store.figures[name], map = store.heat[name][i];
    const trace = {...figure.data[1], z: map.z, text: map.text, customdata: map.customdata.map(row => row.map(hoverText)),
      hovertemplate: '%{customdata}<extra></extra>', xaxis: 'x', yaxis: 'y', showscale: false};
    const [div, draw] = small(figure, [trace], Math.min(figure.layout.height, 300));
    return [part('Score by length and depth', div), draw];
  }
  return null;
}
function curvePart(id) {
  for (const [name, figure] of Object.entries(store.figures)) {
    const own = name.includes('-curves') && figure.data.find(trace => trace.meta.id === id);
    if (!own) continue;
    const base = figure.data.find(trace => store.points.label[trace.meta.id] === 'full');
    const lines = [...new Set([base, own])].filter(Boolean).map(trace => ({...trace, y: trace.meta.perplexity ?? trace.y, visible: true}));
    const [div, draw] = small(figure, lines, 260);
    return [part('Perplexity by position, with the full cache', div), draw];
  }
  return null;
}
function flipsPart(id) {
  const flips = store.flips.of[id];
  if (!flips) return part('Answers that scored otherwise', make('p', {class: 'quiet'}, 'none: each scored as with the full cache, in the same or in other words, or there is none to compare'));
  const [lost, won, shown] = flips, list = make('div');
  for (const [place, answer, score] of shown) {
    const [example, question, gold, full, fullScore] = store.flips.examples[place];
    const rows = [['asked', question || `example ${example}`], ['right', gold], [`full cache (${+fullScore.toPrecision(3)})`, full],
      [`this point (${+score.toPrecision(3)})`, answer]];
    list.append(make('dl', {class: 'flip', title: example}, ...rows.flatMap(([name, text]) => [make('dt', {}, name), make('dd', {}, text)])));
  }
  const more = lost + won - shown.length;
  const said = `${lost} scored lower than with the full cache, ${won} higher${more ? `; ${shown.length} of them:` : ':'}`;
  return part('Answers that scored otherwise', make('p', {class: 'small'}, said), list);
}
// the same point of the page's other tasks, models and modes
function elsewherePart(id) {
  const {label} = store.points, mine = panelOf(id);
  const others = label.map((_, other) => other).filter(other => label[other] === label[id] && panelOf(other) !== mine);
  if (!others.length) return [];
  return [part('The same point elsewhere', make('div', {class: 'elsewhere'}, ...others.slice(0, 12).map(other => {
    const button = make('button', {type: 'button'}, briefly(panelOf(other)));
    button.addEventListener('click', () => pick(other, null, true)); return button;
  })))];
}
function briefly(panel) {
  const alone = store.panels.every(one => one.model === panel.model), twin = store.panels.some(one => one !== panel
    && one.model === panel.model && one.task === panel.task && one.mode === panel.mode);
  if (twin) return panel.title;
  return [alone ? '' : panel.model, panel.task, panel.stream ? '' : panel.mode].filter(Boolean).join(', ');
}
function aside() {
  const known = document.getElementById('detail');
  if (known) return known;
  const made = make('aside', {id: 'detail', 'aria-label': 'one point', tabindex: '-1'});
  made.addEventListener('keydown', event => {
    if (event.target.closest('textarea, input, select')) return;
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (step) { event.preventDefault(); neighbour(step); }
  });
  document.body.append(made);
  return made;
}
// the next point of the same panel by bytes, among those that the filters let through
function neighbour(step) {
  const {panel, bytes} = store.points;
  const same = panel.map((at, id) => id).filter(id => panel[id] === panel[picked] && isOn(id) && bytes[id] !== null);
  same.sort((a, b) => bytes[a] - bytes[b] || a - b);
  const next = same[same.indexOf(picked) + step];
  if (next !== undefined) pick(next);
}
function clearPlots(panel) { for (const plot of panel.querySelectorAll('.js-plotly-plot')) Plotly.purge(plot); }
function pick(id, from, focus) {
  picked = id; opener = from ?? opener;
  const panel = aside(), title = make('h2', {}, store.points.label[id]), about = make('div', {class: 'about small'});
  const buttons = [['‹', 'fewer bytes', () => neighbour(-1)], ['›', 'more bytes', () => neighbour(1)], ['✕', 'close', unpick]];
  const tools = make('span', {class: 'buttons'}, ...buttons.map(([sign, name, act]) => {
    const button = make('button', {type: 'button', 'aria-label': name, title: name}, sign);
    button.addEventListener('click', act); return button;
  }));
  about.innerHTML = hoverText(store.points.about[id]); // markup that the page's maker escaped
  const drawn = [mapPart(id), curvePart(id)].filter(Boolean), held = panel.contains(document.activeElement);
  clearPlots(panel);
  panel.replaceChildren(make('div', {class: 'head'}, title, tools), make('p', {class: 'quiet small'}, panelOf(id).title),
    part('What was measured', about), flipsPart(id), bytesPart(id), ...drawn.map(([section]) => section), ...elsewherePart(id),
    commandPart(id));
  panel.hidden = false; panel.scrollTop = 0; panel.dataset.point = id;
  if (focus || held) panel.focus();
  for (const row of document.querySelectorAll('tr.picked')) row.classList.remove('picked');
  for (const row of document.querySelectorAll(`tr[data-id~="${id}"]`)) row.classList.add('picked');
  return Promise.all([...drawn.map(([, draw]) => draw()), ring()]);
}
function unpick() {
  const panel = document.getElementById('detail');
  if (!panel || panel.hidden) return;
  clearPlots(panel); panel.replaceChildren(); panel.hidden = true; picked = null;
  for (const row of document.querySelectorAll('tr.picked')) row.classList.remove('picked');
  ring();
  if (opener?.isConnected) opener.focus();
}
// the point stands out in the figures of the frontier: larger, with a thick edge
function ring() {
  if (!store.points) return null;
  return Promise.all([...document.querySelectorAll('[id$="-frontier"].js-plotly-plot')].flatMap(plot => plot.data.map((trace, at) => {
    if (trace.mode !== 'lines+markers') return null;
    const i = trace.meta.ids.indexOf(picked);
    if (i < 0 && !trace.meta.marked) return null;
    const {size, width} = trace.meta.plain ??= {size: trace.marker.size, width: trace.marker.line.width};
    const put = (value, other) => trace.meta.ids.map((_, j) => j === i ? other : Array.isArray(value) ? value[j] : value);
    trace.meta.marked = i >= 0;
    return Plotly.restyle(plot, {'marker.size': [put(size, 20)], 'marker.line.width': [put(width, 4)],
      'marker.line.color': [put(hue(INK, painted), '#E8590C')]}, [at]);
  })));
}
function idOf({data, pointNumber}) {
  const ids = data.meta?.ids;
  return Array.isArray(pointNumber) ? ids?.[pointNumber[0]]?.[pointNumber[1]] : ids?.[pointNumber] ?? data.meta?.id;
}
// arrows go from point to point by bytes, enter opens one
function walkPlot(plot) {
  let at = -1;
  const panelAt = stop => parseInt(stop.subplot.slice(1)) || 1; // 'xy' is the first, 'x2y2' the second
  const stops = () => plot.data.flatMap((trace, curveNumber) => trace.mode === 'lines+markers' && trace.meta.ids
    && plot._fullData[curveNumber].visible === true ? trace.x.map((x, pointNumber) => ({x, curveNumber, pointNumber,
      subplot: (trace.xaxis ?? 'x') + (trace.yaxis ?? 'y'), id: trace.meta.ids[pointNumber], y: trace.y[pointNumber]})) : [])
    .filter(stop => stop.x !== null && stop.y !== null).sort((a, b) => panelAt(a) - panelAt(b) || a.x - b.x || a.id - b.id);
  plot.tabIndex = 0;
  plot.setAttribute('role', 'group');
  plot.setAttribute('aria-label', 'quality against bytes: arrows go from point to point, enter opens one');
  plot.addEventListener('keydown', event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key], all = stops();
    if (event.target !== plot || !all.length) return;
    if (step) {
      event.preventDefault(); at = Math.min(Math.max(at + step, 0), all.length - 1);
      const {curveNumber, pointNumber, subplot, id} = all[at];
      plot.dataset.at = id;
      Plotly.Fx.hover(plot, [{curveNumber, pointNumber}], subplot);
    }
    if (event.key === 'Enter' && all[at]) { event.preventDefault(); pick(all[at].id, plot, true); }
  });
  plot.addEventListener('blur', () => Plotly.Fx.unhover(plot));
}
function wireDetail() {
  if (!store.points) return;
  addEventListener('keydown', event => { // closes what lies on top, and that alone
    if (event.key !== 'Escape') return;
    if (document.getElementById('pile')) closeList();
    else if (!document.querySelector('dialog[open]')) unpick();
  });
  document.querySelectorAll('[id$="-frontier"].js-plotly-plot').forEach(walkPlot);
}
