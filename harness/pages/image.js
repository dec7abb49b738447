// a figure as a file for a talk: with what it is of, the model, the task and how many examples
function saidOf(plot) {
  const card = plot.closest('.card'), section = plot.closest('main > section');
  const words = (from, css) => plainly(from?.querySelector(css)?.textContent.trim() ?? '');
  const title = [words(section, 'h2'), words(card, 'h3') || words(card, 'summary')].filter(Boolean).join(': ');
  return [title, words(section, 'p')];
}
function takeImage(plot, format) {
  const [title, below] = saidOf(plot), layout = structuredClone(plot.layout), room = below ? 58 : 40;
  const height = plot._fullLayout.height + room;
  layout.title = {text: `<b>${title}</b>${below ? `<br><span style="font-size:13px">${below}</span>` : ''}`, font: {size: 17,
    color: hue(INK, painted)}, x: 0, xref: 'container', xanchor: 'left', y: 1, yref: 'container', yanchor: 'top', pad: {l: 16, t: 24}};
  if (isNamed(plot)) layout.annotations = [...(layout.annotations ?? []), ...annotations(plot)];
  layout.margin = {...layout.margin, t: layout.margin.t + room};
  Object.assign(layout, {height, width: Math.max(plot._fullLayout.width, 900), autosize: false});
  if (layout.legend?.yref === 'container' && layout.legend.yanchor === 'top') layout.legend.y = 1 - (room + 6) / height;
  return Plotly.downloadImage({data: plot.data, layout, config: {plotlyServerURL: ''}},
    {format, height, width: layout.width, scale: format === 'png' ? 2 : 1, filename: plot.id});
}
