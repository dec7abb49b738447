// names beside the points that a reader looks for first, how many lie in one place, and a list of those on a click
const NEAR = 8; // pixels between points that a click cannot tell apart
const LONGEST = 30; // characters of a name in a figure
const RULER = document.createElement('canvas').getContext('2d');
function isNamed(plot) { return plot.data.some(trace => trace.meta?.labels); }
function axisOf(plot, name) { return plot._fullLayout[name.replace(/^([xy])/, '$1axis')]; }
// the points that are drawn, by panel, with their place in pixels
function spots(plot) {
  const out = new Map();
  plot.data.forEach((trace, at) => {
    if (!trace.meta?.labels || plot._fullData[at].visible !== true) return;
    const [xs, ys] = [trace.xaxis ?? 'x', trace.yaxis ?? 'y'], x = axisOf(plot, xs), y = axisOf(plot, ys);
    const known = out.get(xs) ?? out.set(xs, {x, y, points: []}).get(xs);
    trace.x.forEach((size, i) => {
      if (size === null || trace.y[i] === null) return;
      const left = x.d2p(size), top = y.d2p(trace.y[i]);
      if (!(left > -1 && left < x._length + 1 && top > -1 && top < y._length + 1)) return;
      known.points.push({id: trace.meta.ids[i], left: x._offset + left, top: y._offset + top, name: trace.meta.labels[i],
        base: trace.meta.base, joint: Boolean(trace.meta.sets)});
    });
  });
  return out;
}
function isNear(one, other) { return Math.hypot(one.left - other.left, one.top - other.top) <= NEAR; }
// what a name must not cover: markers, and the steps of the frontier
function obstacles(plot, panel, xs) {
  const boxes = panel.points.map(({left, top}) => [left - 7, top - 7, left + 7, top + 7]);
  const line = plot.data.find(trace => trace.mode === 'lines' && (trace.xaxis ?? 'x') === xs && trace.name?.startsWith('frontier'));
  const steps = (line?.x ?? []).map((size, i) => [panel.x._offset + panel.x.d2p(size), panel.y._offset + panel.y.d2p(line.y[i])])
    .filter(([left, top]) => Number.isFinite(left + top));
  steps.forEach(([left, top], i) => {
    const [right, next] = steps[i + 1] ?? [left, top];
    boxes.push([left, top - 2, right, top + 2], [right - 2, Math.min(top, next), right + 2, Math.max(top, next)]);
  });
  return boxes;
}
function away({left, top}, box) {
  return Math.hypot(Math.max(box[0] - left, left - box[2], 0), Math.max(box[1] - top, top - box[3], 0));
}
function meets(one, other) { return one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3]; }
// the middle of a text near a point: the first place without an obstacle and nearer to it than to any other, or with a line to
// it; where it must stand, the one with the fewest
function roomFor(spot, width, panel, boxes, down) {
  const {x, y} = panel, sides = [[-1, -1], [1, -1], [1, 1], [-1, 1], [0, -1], [0, 1], [1, 0], [-1, 0]];
  let best = null;
  for (const gap of [8, 18, 32, 48]) for (const [across, along] of sides) {
    const left = spot.left + across * (width / 2 + gap), top = spot.top + (down ? -along : along) * (8 + gap);
    const box = [left - width / 2, top - 8, left + width / 2, top + 8];
    if (box[0] < x._offset - 2 || box[2] > x._offset + x._length + 2) continue;
    if (box[1] < y._offset - 6 || box[3] > y._offset + y._length) continue;
    const far = gap > 20, others = far ? [] : panel.points.filter(one => !isNear(one, spot) && away(one, box) <= away(spot, box));
    const met = boxes.filter(other => meets(box, other)).length + Math.min(others.length, 1);
    if (!best || met < best.met) best = {left, top, box, met, far};
    if (!met) return best;
  }
  return best;
}
function wording(spot, others) {
  const full = store.points.label[spot.id], short = spot.name && spot.name.replace(/&#?[a-z0-9]+;/gi, '·').length <= LONGEST;
  const bare = short ? spot.name : plainly(full.length > LONGEST ? full.slice(0, LONGEST) + '…' : full);
  return bare + (others ? ` +${others}` : '');
}
// what to write where: (spot, middle of the text in pixels, text, whether a line leads to it, how it is set)
function notes(plot) {
  const made = [];
  RULER.font = `12px ${plot._fullLayout.font.family}`;
  for (const [xs, panel] of spots(plot)) {
    const boxes = obstacles(plot, panel, xs), down = panel.points.length && !panelOf(panel.points[0].id).higher, done = new Set();
    const put = (spot, text, set) => {
      const shown = text.replace(/&#?[a-z0-9]+;/gi, 'm');
      const room = roomFor(spot, RULER.measureText(shown).width * (set === 'best' ? 1.12 : 1.04) + 4, panel, boxes, down);
      if (!room || (room.met && !['best', 'base'].includes(set))) return;
      boxes.push(room.box);
      made.push({spot, text, set, ...room});
    };
    const group = spot => panel.points.filter(other => isNear(spot, other)), best = spot => !spot.joint && marked.has(spot.id);
    const named = panel.points.filter(spot => spot.name || best(spot)), crowded = panel.points.length > store.crowded;
    for (const spot of named.sort((a, b) => best(b) - best(a) || Boolean(b.base) - Boolean(a.base) || a.left - b.left)) {
      if (done.has(spot)) continue;
      const all = group(spot); all.forEach(one => done.add(one));
      const text = wording(spot, crowded ? 0 : all.length - 1);
      put(spot, best(spot) ? `${text}: best that fits` : text, best(spot) ? 'best' : spot.base ? 'base' : 'name');
    }
    for (const spot of crowded ? [] : panel.points) {
      if (done.has(spot)) continue;
      const all = group(spot).filter(one => !done.has(one)); all.forEach(one => done.add(one));
      if (all.length > 1) put(spot, `${all.length} points`, 'many');
    }
  }
  return made;
}
// on the page they are elements over the figure: Plotly would compute all of a figure anew for an annotation of its own
function showNames(plot) {
  plot.querySelector('.names')?.remove();
  const layer = make('div', {class: 'names'}), box = plot.querySelector('.svg-container');
  for (const {spot, text, set, left, top, far} of notes(plot)) {
    const name = make('span', {class: set, style: `left:${left}px;top:${top}px`}), [across, along] = [left - spot.left, top - spot.top];
    name.innerHTML = text; // markup that the page's maker escaped, or `plainly`
    if (far) layer.append(make('i', {style: `left:${spot.left}px;top:${spot.top}px;width:${Math.hypot(across, along)}px;transform:rotate(${
      Math.atan2(along, across)}rad)`}));
    layer.append(name);
  }
  box.insertBefore(layer, box.querySelectorAll('.main-svg')[1] ?? null); // below what a hover says
}
// in a saved figure they are annotations
function annotations(plot) {
  const {l, t, w, h} = plot._fullLayout._size;
  return notes(plot).map(({spot, text, set, left, top, far}) => ({xref: 'paper', yref: 'paper', x: (spot.left - l) / w, y: 1 - (spot.top - t) / h,
    text: set === 'best' ? `<b>${text}</b>` : text, showarrow: true, ax: left - spot.left, ay: top - spot.top, arrowhead: 0, arrowwidth: 1,
    standoff: 7, arrowcolor: far ? hue('#6b7280', painted) : 'rgba(0,0,0,0)', bgcolor: hue('rgba(255,255,255,0.6)', painted),
    font: {size: 12, color: hue(set === 'many' ? '#6b7280' : INK, painted)}}));
}
// a click on one point opens it, on several in one place a list of them
function choose(plot, event) {
  const id = idOf(event.points[0]);
  if (id == null) return;
  for (const panel of isNamed(plot) ? spots(plot).values() : []) {
    const spot = panel.points.find(one => one.id === id), here = spot ? panel.points.filter(one => isNear(one, spot)) : [];
    if (here.length > 1) { offer(here, event.event ?? {}, plot); return; }
  }
  pick(id, plot);
}
function offer(here, {clientX = 0, clientY = 0}, plot) {
  closeList(); Plotly.Fx.unhover(plot);
  const {label, score, bytes} = store.points, box = make('div', {id: 'pile', role: 'dialog', 'aria-label': 'points in one place'});
  box.append(make('p', {class: 'quiet small'}, `${here.length} points lie here`));
  for (const {id, joint} of here.sort((a, b) => bytes[a.id] - bytes[b.id] || a.id - b.id)) {
    const more = joint ? '' : `: ${number(score[id], 3)} at ${iec(bytes[id])}`, button = make('button', {type: 'button'}, label[id] + more);
    button.addEventListener('click', () => { closeList(); pick(id, plot, true); });
    box.append(button);
  }
  document.body.append(box);
  box.style.left = `${Math.max(8, Math.min(clientX + 8, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(8, Math.min(clientY + 8, innerHeight - box.offsetHeight - 8))}px`;
  box.querySelector('button').focus();
}
function closeList() { document.getElementById('pile')?.remove(); }
addEventListener('pointerdown', event => { if (!event.target.closest?.('#pile')) closeList(); });
