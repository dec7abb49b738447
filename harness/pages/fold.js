// in a narrow window the panels of a figure stand below each other, and its legend below them
const NARROW = matchMedia('(max-width: 700px)');
const PANEL = 300, BETWEEN = 128; // pixels of a panel, and of the axis and the title between two
const TOOLS = 110; // pixels for the buttons above a legend and for its rows
const LINE = 46; // characters of a line there
const wide = {}; // by figure: what of its layout is changed, as it was
// a title in lines that a narrow window has room for, in a wide one as it is
function lined(text) {
  if (!NARROW.matches) return text.replaceAll('<br>', ' ');
  return text.replaceAll('<br>', ' ').split(' ').reduce((lines, word) => {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    return longer.replace(/<[^>]*>/g, '').length <= LINE ? [...lines.slice(0, -1), longer] : [...lines, word];
  }, []).join('<br>');
}
function panelAxes(layout) {
  return Object.keys(layout).filter(key => /^xaxis[0-9]*$/.test(key)).sort((a, b) => (+a.slice(5) || 1) - (+b.slice(5) || 1))
    .map(key => [layout[key], layout['yaxis' + key.slice(5)]]);
}
function remember(layout) {
  const {height, legend, margin} = layout;
  const titles = (layout.annotations ?? []).map(({font: {color, ...font} = {}, ...note}) => ({...note, font})); // a theme has its colour
  return structuredClone({height, legend, margin, titles,
    axes: panelAxes(layout).map(([x, y]) => [x.domain, y.domain, y.showticklabels, y.title])});
}
function restore(layout, was) {
  const {titles, axes, ...rest} = structuredClone(was);
  Object.assign(layout, rest);
  if (rest.legend === undefined) delete layout.legend;
  panelAxes(layout).forEach(([x, y], i) => {
    const [across, along, ticks, title] = axes[i];
    x.domain = across; y.domain = along; y.showticklabels = ticks;
    if (title === undefined) delete y.title; else y.title = {...title, text: y.title?.text ?? title.text};
    if (x.title?.text) x.title = {...x.title, text: lined(x.title.text)};
  });
  retitle(layout, titles);
}
// the titles of the panels take these places; their texts stay what a selector has made of them
function retitle(layout, titles) {
  if (titles.length) layout.annotations = layout.annotations.map((note, i) => ({...note, ...titles[i],
    font: {...note.font, ...titles[i].font}, text: lined(note.text)}));
}
function stack(layout) {
  const axes = panelAxes(layout), n = axes.length, inner = n * PANEL + (n - 1) * BETWEEN, step = (PANEL + BETWEEN) / inner;
  axes.forEach(([x, y], i) => {
    const top = 1 - i * step;
    x.domain = [0, 1]; y.domain = [Math.max(top - PANEL / inner, 0), top]; y.showticklabels = true;
    if (!y.title?.text && axes[0][1].title) y.title = structuredClone(axes[0][1].title);
    if (x.title?.text) x.title = {...x.title, text: lined(x.title.text)};
  });
  if (layout.annotations) layout.annotations = layout.annotations.map((note, i) => ({...note,
    x: 0.5, y: 1 - i * step, text: lined(note.text), font: {...note.font, size: 13}}));
  return inner;
}
// a layout for the window as it is: in place, before the figure is drawn
function fold(plot, data, layout) {
  if (!plot.id || !layout.margin) return;
  const was = wide[plot.id] ??= remember(layout);
  if (layout.folded && layout.barmode) { layout.height -= TOOLS; layout.margin = {...was.margin}; layout.legend = {...was.legend}; }
  else if (layout.folded) restore(layout, was);
  delete layout.folded;
  if (!NARROW.matches) return;
  layout.folded = true;
  layout.margin = {...layout.margin, l: 52, r: 10};
  if (layout.barmode) { // its legend is above it already: it makes room for the buttons
    layout.margin.t += TOOLS; layout.height += TOOLS;
    layout.legend = {...layout.legend, y: 1 - 36 / layout.height};
    return;
  }
  const inner = stack(layout);
  layout.margin.t = layout.annotations?.length ? 76 : 44;
  const names = data.filter(({showlegend, visible, type}) => showlegend !== false && visible !== false && type !== 'heatmap')
    .map(trace => trace.name ?? '');
  const widths = names.reduce((sum, name) => sum + 50 + 6.6 * name.length, 0), rows = Math.ceil(1.15 * widths / (plot.clientWidth - 62));
  const below = names.length ? Math.min(rows, 14) * 21 + 16 : 0;
  layout.margin.b += below + 16;
  layout.height = inner + layout.margin.t + layout.margin.b;
  if (below) layout.legend = {...layout.legend, orientation: 'h', x: 0, xanchor: 'left', y: 0, yref: 'container', yanchor: 'bottom'};
}
function wireFold() {
  NARROW.addEventListener('change', () => Promise.all(Object.keys(store.figures).map(id => document.getElementById(id))
    .map(plot => draw(plot, {data: plot.data, layout: plot.layout}))).then(ring));
}
