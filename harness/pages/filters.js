// filters over all points of a page: what they leave out goes from figures, maps, tables and sections alike; and a limit of bytes
const NAMES = {model: 'model', task: 'task', family: 'family', phase: 'phase', budget: 'budget'};
const UNITS = {B: 1, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, KIB: 2 ** 10, MIB: 2 ** 20, GIB: 2 ** 30, TIB: 2 ** 40};
const wanted = {};
let passing = null; // whether each point passes; null where all do
let limit = null; // {bytes} or {share}: what a reader's cache may take
let marked = new Set(); // the best point within the limit of each panel
const unranked = new Set(store.points?.unranked ?? []);
function isOn(id) { return passing === null || passing[id]; }
function filterPoints() {
  const asked = Object.entries(wanted).filter(([, name]) => name !== '');
  passing = asked.length ? store.points.label.map((_, id) => asked.every(([facet, name]) => store.facets[facet].of[id] === +name)) : null;
}
function fits(id) {
  const {bytes, full} = store.points;
  return limit === null || (bytes[id] !== null && (limit.share === undefined ? bytes[id] <= limit.bytes : bytes[id] <= limit.share * full[id]));
}
function gain(id) { return panelOf(id).higher ? store.points.score[id] : -store.points.score[id]; }
// per panel the point that scores best within the limit, of equal ones the smallest
function markBest() {
  const best = new Map();
  if (limit !== null) store.points.label.forEach((_, id) => {
    if (!isOn(id) || unranked.has(id) || store.points.score[id] === null || !fits(id)) return;
    const panel = store.points.panel[id], known = best.get(panel);
    if (known === undefined || gain(id) > gain(known) || (gain(id) === gain(known) && store.points.bytes[id] < store.points.bytes[known]))
      best.set(panel, id);
  });
  marked = new Set(best.values());
}
function drawn(trace, i) { return trace.meta.base || (trace.meta.sets ? trace.meta.sets[i].some(isOn) : isOn(trace.meta.ids[i])); }
function strength(own, trace, i) {
  const clear = painted ? Math.min(1, own + 0.25) : own, ids = trace.meta.sets?.[i] ?? [trace.meta.ids[i]];
  return ids.some(isOn) && ids.some(fits) ? clear : 0.25 * clear;
}
// the frontier of the points that a filter lets through, as a line; those on that of all points stay outlined
function frontOf(data, line, unit) {
  const known = data.flatMap(trace => trace.mode === 'lines+markers' && trace.meta?.ids && (trace.xaxis ?? 'x') === (line.xaxis ?? 'x')
    ? trace.meta.ids.map((id, i) => ({id, x: trace.meta[unit][i], y: trace.y[i], size: store.points.bytes[id]})) : [])
    .filter(({id, size}) => isOn(id) && size !== null && store.points.score[id] !== null && !unranked.has(id))
    .sort((a, b) => a.size - b.size || gain(b.id) - gain(a.id));
  let best = -Infinity;
  return known.filter(({id}) => gain(id) > best && ((best = gain(id)), true));
}
// traces of a frontier as filters, limit, unit and theme have them, in place: sizes, line of the frontier, strength, legend
function sieve(plot, data) {
  if (!data.some(trace => trace.meta?.labels)) return;
  const unit = plot.dataset.unit === 'ratio' ? 'ratio' : 'bytes', groups = new Set();
  for (const trace of data.filter(one => one.mode !== 'lines' && one.meta?.ids)) {
    trace.x = trace.meta[unit].map((size, i) => drawn(trace, i) ? size : null);
    trace.meta.opacity ??= trace.marker.opacity;
    trace.marker.opacity = trace.meta.opacity.map((own, i) => strength(own, trace, i));
  }
  for (const trace of data.filter(one => one.mode === 'lines')) {
    if (!trace.meta?.ids) { trace.visible = passing === null; continue; } // of a joint frontier: that of all points, or none
    trace.meta.whole ??= {y: trace.y};
    const front = passing === null ? null : frontOf(data, trace, unit), view = plot.dataset.view;
    trace.x = front ? front.map(point => point.x) : trace.meta[unit];
    trace.y = front ? front.map(point => point.y) : view ? (view === 'score' ? trace.meta.score : trace.meta[view]).y : trace.meta.whole.y;
    trace.name = front ? 'frontier of what is shown' : 'frontier';
  }
  for (const trace of data.filter(one => one.mode !== 'markers+text')) {
    const group = trace.legendgroup ?? trace.name, any = trace.x.some(size => size !== null);
    trace.showlegend = any && !groups.has(group);
    if (any) groups.add(group);
  }
}
function sift1(select) { // options of maps
  store.maps[select.dataset.plot].forEach((id, i) => { select.options[i].hidden = !isOn(id); });
}
function frontiers() { return [...document.querySelectorAll('.js-plotly-plot[data-unit]')].filter(isNamed); }
function resieve(plot) { sieve(plot, plot.data); return Plotly.redraw(plot).then(() => retick(plot)); }
function applyFilters() {
  filterPoints(); markBest();
  const done = frontiers().map(resieve);
  for (const plot of document.querySelectorAll('[id*="-bytes"].js-plotly-plot')) done.push(showRows(plot));
  for (const plot of document.querySelectorAll('[id*="-curves"].js-plotly-plot')) done.push(showLines(plot));
  document.querySelectorAll('[data-id]').length && document.querySelectorAll('.scroll table').forEach(sift);
  document.querySelectorAll('select[data-plot]').forEach(sift1);
  const sections = new Set(store.points.panel.filter((_, id) => isOn(id)).map(panel => store.panels[panel].section));
  for (const section of document.querySelectorAll('main > section')) section.hidden = !sections.has(section.id);
  tell();
  return Promise.all(done).then(ring);
}
function tell() {
  const all = store.points.label.length, left = passing === null ? all : passing.filter(Boolean).length, n = left.toLocaleString('en');
  document.getElementById('passing').textContent = passing === null ? `${n} points` : `${n} of ${all.toLocaleString('en')} points`;
  document.getElementById('filtered').textContent = passing === null ? '' : left
    ? 'In the frontier figures the full cache stays as a pale reference; sentences and outlined points stay those of all points.' : 'No point matches these filters.';
  document.getElementById('best').textContent = limit === null ? '' : saidOfLimit();
}
// what fits, a panel after the other, with its peak where that does not: a share is of the full cache's own peak
function saidOfLimit() {
  const {label, bytes, score, peak, over} = store.points, words = [...new Set(store.points.panel)].map(panel => {
    const id = [...marked].find(one => store.points.panel[one] === panel), name = briefly(store.panels[panel]);
    if (id === undefined) return store.points.panel.some((one, other) => one === panel && isOn(other)) ? `${name}: nothing fits` : '';
    const [most, allowed] = limit.share === undefined ? [peak[id], limit.bytes] : [over[id], limit.share];
    return `${name}: ${label[id]}, ${number(score[id], 3)} at ${iec(bytes[id])}${most !== null && most > allowed ? ` (but it peaks at ${
      limit.share === undefined ? iec(peak[id]) : `${number(100 * over[id], 3)} % of the full cache's peak`})` : ''}`;
  }).filter(Boolean);
  return `Best score that fits. ${words.slice(0, 6).join('; ')}${words.length > 6 ? `; and ${words.length - 6} more` : ''}.`;
}
// {bytes} or {share} from what was typed; null where nothing was, undefined where it is neither
function limitOf(text) {
  if (!text.trim()) return null;
  const found = text.trim().match(/^([0-9]*[.,]?[0-9]+)\s*(%|[KMGT]i?B|B)$/i), size = found && +found[1].replace(',', '.');
  return !found ? undefined : found[2] === '%' ? {share: size / 100} : {bytes: size * UNITS[found[2].toUpperCase()]};
}
function limitInput() {
  const input = make('input', {type: 'search', id: 'limit', size: 12, placeholder: '8 MiB or 50 %',
    title: 'the most KV bytes that a sample may hold once compressed, or their share of the full cache: marks the best point that fits'});
  input.addEventListener('change', () => {
    const asked = limitOf(input.value);
    input.setCustomValidity(asked === undefined ? 'a number with a unit: 8 MiB, 1.5 GB or 50 %' : '');
    if (!input.reportValidity()) return;
    limit = asked; applyFilters();
  });
  input.addEventListener('search', () => input.dispatchEvent(new Event('change')));
  return make('label', {}, 'my limit ', input);
}
function wireFilters() {
  const bar = document.getElementById('filters');
  if (!bar || !store.facets) return;
  for (const [facet, name] of Object.entries(NAMES)) {
    const {names, of} = store.facets[facet];
    if (names.length < 2) continue;
    const select = make('select', {'data-filter': facet}, make('option', {value: ''}, 'all'));
    const counts = names.map(() => 0); for (const place of of) counts[place] += 1;
    const order = names.map((_, i) => i).sort((a, b) => names[a].localeCompare(names[b], 'en', {numeric: true}));
    for (const i of order) select.append(make('option', {value: i}, `${names[i]} (${counts[i]})`));
    wanted[facet] = '';
    select.addEventListener('change', () => { wanted[facet] = select.value; applyFilters(); });
    bar.append(make('label', {}, name + ' ', select));
  }
  const reset = make('button', {type: 'button'}, 'show all'), input = limitInput();
  reset.addEventListener('click', () => {
    for (const select of bar.querySelectorAll('select')) { select.value = ''; wanted[select.dataset.filter] = ''; }
    input.querySelector('input').value = ''; limit = null;
    applyFilters();
  });
  bar.append(input, make('span', {class: 'buttons'}, reset), make('span', {id: 'passing', class: 'quiet', 'aria-live': 'polite'}),
    ...['filtered', 'best'].map(id => make('p', {id, class: 'quiet small', 'aria-live': 'polite'})));
  tell();
}
