// filters over all points of a page: what they leave out goes from figures, maps, tables and sections alike
const NAMES = {model: 'model', task: 'task', family: 'family', phase: 'phase', budget: 'budget'};
const wanted = {};
let passing = null; // whether each point passes; null where all do
function isOn(id) { return passing === null || passing[id]; }
function filterPoints() {
  const asked = Object.entries(wanted).filter(([, name]) => name !== '');
  passing = asked.length ? store.points.label.map((_, id) => asked.every(([facet, name]) => store.facets[facet].of[id] === +name)) : null;
}
// byte values of a trace of the frontier, none where a filter leaves the point out; the frontier stays that of all points
function sizesOf(plot, trace) {
  const sizes = trace.meta[plot.dataset.unit === 'ratio' ? 'ratio' : 'bytes'];
  return trace.mode === 'lines' ? sizes : sizes.map((size, i) => isOn(trace.meta.ids[i]) ? size : null);
}
function sift1(select) { // options of maps
  store.maps[select.dataset.plot].forEach((id, i) => { select.options[i].hidden = !isOn(id); });
}
function applyFilters() {
  filterPoints();
  const done = [];
  for (const plot of document.querySelectorAll('[id$="-frontier"].js-plotly-plot')) {
    const index = plot.data.map((trace, i) => i).filter(i => plot.data[i].meta?.ids);
    done.push(Plotly.restyle(plot, {x: index.map(i => sizesOf(plot, plot.data[i]))}, index));
  }
  for (const plot of document.querySelectorAll('[id*="-bytes"].js-plotly-plot')) done.push(showRows(plot));
  for (const plot of document.querySelectorAll('[id*="-curves"].js-plotly-plot')) done.push(showLines(plot));
  document.querySelectorAll('[data-id]').length && document.querySelectorAll('.scroll table').forEach(sift);
  document.querySelectorAll('select[data-plot]').forEach(sift1);
  const sections = new Set(store.points.panel.filter((_, id) => isOn(id)).map(panel => store.panels[panel].section));
  for (const section of document.querySelectorAll('main > section')) section.hidden = !sections.has(section.id);
  const all = store.points.label.length, left = passing === null ? all : passing.filter(Boolean).length;
  document.getElementById('passing').textContent = `${left.toLocaleString('en')} of ${all.toLocaleString('en')} points`;
  return Promise.all(done).then(ring);
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
  if (!bar.children.length) { bar.remove(); return; }
  const reset = make('button', {type: 'button'}, 'show all');
  reset.addEventListener('click', () => {
    for (const select of bar.querySelectorAll('select')) { select.value = ''; wanted[select.dataset.filter] = ''; }
    applyFilters();
  });
  bar.append(make('span', {class: 'buttons'}, reset), make('span', {id: 'passing', class: 'quiet', 'aria-live': 'polite'}));
  document.getElementById('passing').textContent = `${store.points.label.length.toLocaleString('en')} points`;
}
