const store = JSON.parse(document.getElementById('content').textContent);
// what stands several times in a page is sent once: long lists, and the lines of hover texts
function unpack(value) {
  if (value === null || typeof value !== 'object') return value;
  if (Array.isArray(value)) return value.map(unpack);
  if ('@' in value) return 'n' in value ? Array(value.n).fill(value['@']) : store.lists[value['@']].slice();
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, unpack(one)]));
}
function hoverText(n) {
  return store.texts[n].map(line => store.lines[line].map(part => store.parts[part]).join('')).join('<br>');
}
for (const name of ['figures', 'points', 'facets', 'rows']) if (name in store) store[name] = unpack(store[name]);
function iec(v) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0; while (Math.abs(v) >= 1024 && i < 4) { v /= 1024; i += 1; }
  return (i ? +v.toPrecision(3) : Math.round(v)) + ' ' + units[i];
}
// an element with attributes; children that are texts stay texts, whatever they hold
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function save(name, type, text) {
  const link = make('a', {download: name, href: URL.createObjectURL(new Blob([text], {type}))});
  document.body.append(link); link.click(); link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
// works without a secure context and without a question of the browser, unlike its clipboard
function copy(text, button) {
  const area = make('textarea', {class: 'aside'}); area.value = text;
  (button.closest('dialog') ?? document.body).append(area); area.select();
  const done = document.execCommand('copy'); area.remove(); button.focus();
  const name = button.dataset.name ??= button.textContent;
  button.textContent = done ? 'copied' : 'select the text and copy it';
  setTimeout(() => { button.textContent = name; }, 1500);
}
// a text to read, copy or take along
function showText(title, name, text) {
  document.getElementById('text')?.remove();
  const area = make('textarea', {readonly: '', 'aria-label': title, spellcheck: 'false'}); area.value = text;
  const buttons = {Copy: button => copy(text, button), Download: () => save(name, 'text/plain', text), Close: () => dialog.close()};
  const row = make('div', {class: 'buttons'}, ...Object.entries(buttons).map(([label, act]) => {
    const button = make('button', {type: 'button'}, label); button.addEventListener('click', () => act(button)); return button;
  }));
  const dialog = make('dialog', {id: 'text'}, make('h3', {}, title), area, row);
  document.body.append(dialog); dialog.showModal(); area.select();
}
