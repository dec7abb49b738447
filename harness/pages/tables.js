// tables of points: filled, sorted, searched, walked through by keys, and taken along
function cell(number) {
  const code = store.cells[number], kind = code[0], rest = code.slice(1), at = rest.indexOf('|');
  if (kind === 'v') return `<td data-v="${rest.slice(0, at)}">${rest.slice(at + 1)}</td>`;
  return `<td class=l${kind === 't' ? ' data-tip' : ''}>${rest}</td>`;
}
function fillTable(id, rows) {
  const ids = store.rows?.[id];
  document.getElementById(id).tBodies[0].innerHTML = rows.map(([kind, ...cells], i) =>
    `<tr class="${store.cells[kind]}"${ids ? ` data-id="${[ids[i]].flat().join(' ')}" tabindex=${i ? -1 : 0}` : ''}>${
      cells.map(cell).join('')}</tr>`).join('');
}
// the points that a row stands for: one, or those of several tasks or models together
function idsOf(row) { return row.dataset.id.split(' ').map(Number); }
function firstOf(row) { const ids = idsOf(row); return ids.find(isOn) ?? ids[0]; }
// a verdict says on hover what the glossary of the page says of it, whatever number stands in it
function explain() {
  const known = [...document.querySelectorAll('#labels tbody tr')].map(({cells: [, label, meaning, trust]}) =>
    [...label.textContent.split('X'), `${meaning.textContent}. Trust it? ${trust.textContent}.`]);
  const of = text => {
    for (const [start, ...rest] of known) {
      const said = rest.pop(), [end] = rest;
      if (end === undefined ? start === text : text.startsWith(start) && text.endsWith(end))
        return `${text}: ${end === undefined ? said : said.replaceAll(/\bX\b/g, text.slice(start.length, text.length - end.length))}`;
    }
  };
  for (const cell of document.querySelectorAll('[data-tip]')) {
    const [verdict, mark] = cell.textContent.split(' ‡');
    cell.title = [of(verdict), mark === undefined ? undefined : of('‡')].filter(Boolean).join('\n');
  }
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
// a row shows where the filters let its point through and one of its cells holds what is searched
function sift(table) {
  const wanted = (document.querySelector(`[data-search="${table.id}"]`)?.value ?? '').trim().toLowerCase();
  for (const row of table.tBodies[0].rows) {
    const passes = !('id' in row.dataset) || idsOf(row).some(isOn);
    row.hidden = !(passes && (!wanted || [...row.cells].some(cell => cell.textContent.toLowerCase().includes(wanted))));
  }
  const shown = shownRows(table);
  if (shown.length && !shown.some(row => row.tabIndex === 0) && 'id' in shown[0].dataset) shown[0].tabIndex = 0;
}
function shownRows(table) { return [...table.tBodies[0].rows].filter(row => !row.hidden); }
// the heads that name columns, the last row of them; one says before its own name of which group it is
function headsOf(table) { return [...table.tHead.rows[table.tHead.rows.length - 1].cells]; }
function nameOf(head) { return (head.dataset.of ? `${head.dataset.of}: ` : '') + head.textContent; }
function csv(table) {
  // a text that a spreadsheet would take for a formula gets a quote before it
  const quoted = text => '"' + text.replace(/^(?=[=+\-@\t])/, "'").replaceAll('"', '""') + '"';
  const value = cell => 'v' in cell.dataset ? cell.dataset.v : quoted(cell.textContent);
  const lines = shownRows(table).map(row => [...row.cells].map(value).join(','));
  return [headsOf(table).map(head => quoted(nameOf(head))).join(','), ...lines].join('\r\n') + '\r\n';
}
function forPaper(table) {
  const heads = headsOf(table), columns = heads.map((_, i) => i).filter(i => 'paper' in heads[i].dataset);
  return [heads.map(nameOf), ...shownRows(table).map(row => [...row.cells].map(cell => cell.textContent))]
    .map(row => columns.map(i => row[i]));
}
function markdown(table) {
  const [head, ...rows] = forPaper(table).map(row => '| ' + row.map(
    text => text.replace(/[\\|`*_<>[\]]/g, '\\$&')).join(' | ') + ' |');
  return [head, '|' + ' --- |'.repeat(forPaper(table)[0].length), ...rows].join('\n') + '\n';
}
function latex(table) {
  const spelled = {'\\': '\\textbackslash{}', '~': '\\textasciitilde{}', '^': '\\textasciicircum{}', '<': '\\textless{}',
    '>': '\\textgreater{}', '‡': '$\\ddagger$', '–': '--', '●': '$\\bullet$', '±': '$\\pm$', '≤': '$\\le$', '▲': '$\\blacktriangle$', '·': '$\\cdot$'};
  const escaped = text => text.replace(/[&%$#_{}]|[\\~^<>‡–●±≤▲·]/g, mark => spelled[mark] ?? '\\' + mark);
  const [head, ...rows] = forPaper(table).map(row => '  ' + row.map(escaped).join(' & ') + ' \\\\');
  const lines = [`\\begin{tabular}{l${'r'.repeat(forPaper(table)[0].length - 1)}}`, '  \\toprule', head, '  \\midrule', ...rows];
  return [...lines, '  \\bottomrule', '\\end{tabular}'].join('\n') + '\n';
}
const exported = {
  csv(table) { save(table.id + '.csv', 'text/csv', csv(table)); },
  latex(table) { showText('LaTeX (booktabs)', table.id + '.tex', latex(table)); },
  markdown(table) { showText('Markdown', table.id + '.md', markdown(table)); },
};
function focusRow(row) {
  for (const other of row.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  row.tabIndex = 0; row.focus();
}
function walkRows(event) {
  const row = event.target.closest('tr[data-id]');
  if (!row || event.target !== row) return;
  const rows = shownRows(row.closest('table')), i = rows.indexOf(row);
  const to = {ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: rows.length - 1}[event.key];
  if (to !== undefined) { event.preventDefault(); if (rows[to]) focusRow(rows[to]); }
  if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); pick(firstOf(row), row, true); }
}
function wireTables() {
  explain();
  document.querySelectorAll('th button').forEach(b => b.addEventListener('click', () => sortBy(b)));
  for (const body of document.querySelectorAll('.scroll tbody')) {
    body.addEventListener('keydown', walkRows);
    body.addEventListener('click', event => {
      const row = event.target.closest('tr[data-id]');
      if (row && !getSelection().toString()) { focusRow(row); pick(firstOf(row), row); }
    });
  }
  for (const input of document.querySelectorAll('[data-search]'))
    input.addEventListener('input', () => sift(document.getElementById(input.dataset.search)));
  for (const group of document.querySelectorAll('[data-export]')) for (const button of group.children)
    button.addEventListener('click', () => exported[button.value](document.getElementById(group.dataset.export)));
}
