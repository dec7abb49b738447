// a figure is made in light colours; in the dark theme these take their places. The page's own colours are in page.css
const INK = '#1b1f24';
const HUES = [[INK, '#e8eaed'], ['white', '#171b21'], ['#e8ebef', '#2b323a'], ['#6b7280', '#9aa3ae'],
  ['#b6bdc6', '#4d5661'], ['#c3c9d1', '#4b535d'], ['#5D5D5D', '#b4b8bd'], ['#0072B2', '#4aa8e0'], ['#7A3E9D', '#b98ad6'],
  ['#8C5A3C', '#c99a7d'], ['#C2193B', '#f0647e'], ['#56B4E9', '#d3ecfb']];
const SHADES = [['rgba(27,31,36,', 'rgba(232,234,237,'], ['rgba(93,93,93,', 'rgba(180,184,189,'], ['rgba(0,114,178,', 'rgba(74,168,224,'],
  ['rgba(122,62,157,', 'rgba(185,138,214,'], ['rgba(140,90,60,', 'rgba(201,154,125,'], ['rgba(194,25,59,', 'rgba(240,100,126,'],
  ['rgba(255,255,255,', 'rgba(23,27,33,']];
const FAINT = [['0.08)', '0.2)'], ['0.3)', '0.55)'], ['0.4)', '0.65)']]; // lines that are quiet on white would be gone on black
const HELD = new Set(['x', 'y', 'z', 'text', 'customdata', 'hovertemplate', 'ids', 'bytes', 'ratio', 'name', 'legendgroup']);
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}
function hue(colour, dark) {
  const from = dark ? 0 : 1, to = 1 - from;
  for (const pair of HUES) if (pair[from] === colour) return pair[to];
  const faint = FAINT.find(pair => colour.startsWith('rgba(') && colour.endsWith(',' + pair[from]));
  const alpha = faint ? colour.slice(0, -faint[from].length) + faint[to] : colour;
  for (const pair of SHADES) if (alpha.startsWith(pair[from])) return pair[to] + alpha.slice(pair[from].length);
  return alpha;
}
function dye(node, dark) {
  for (const [key, one] of Object.entries(node)) {
    if (HELD.has(key)) continue;
    if (typeof one === 'string') node[key] = hue(one, dark);
    else if (one !== null && typeof one === 'object' && !(Array.isArray(one) && typeof one[0] === 'number')) dye(one, dark);
  }
  return node;
}
let painted = false; // whether figures have the colours of the dark theme
function paint(dark) {
  if (dark === painted) return null;
  painted = dark;
  dye(store.figures, dark); dye(store.views ?? {}, dark);
  return Promise.all([...document.querySelectorAll('.js-plotly-plot')].map(plot => {
    dye(plot.data, dark); dye(plot.layout, dark); sieve(plot, plot.data); return Plotly.redraw(plot);
  }));
}
function wireTheme() {
  const group = make('span', {class: 'buttons', id: 'theme', role: 'group', 'aria-label': 'colours'});
  for (const name of ['auto', 'light', 'dark']) {
    const button = make('button', {type: 'button', value: name, 'aria-pressed': String(name === 'auto')}, name);
    button.addEventListener('click', () => {
      for (const other of group.children) other.setAttribute('aria-pressed', String(other === button));
      if (name === 'auto') delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
      paint(isDark());
    });
    group.append(button);
  }
  document.querySelector('main').prepend(group);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => paint(isDark()));
  addEventListener('beforeprint', () => { for (const one of document.querySelectorAll('details')) one.open = true; paint(false); });
  addEventListener('afterprint', () => paint(isDark()));
}
