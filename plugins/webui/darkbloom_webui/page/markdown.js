// A small part of Markdown, made into elements. Whatever the text holds, it stays text: HTML in it
// is shown as it is written, pictures are not loaded, links go to web and mail addresses only.

import { el, icon } from './dom.js';

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,7})([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    String.raw`\\([\\\`*_{}\[\]()#+\-.!~|<>])`, // 1 escaped
    String.raw`(\`+)(?!\`)(.+?)(?<!\`)\2(?!\`)`, // 2, 3 code
    String.raw`(\*\*|__)(?=\S)(.+?)(?<=\S)\4`, // 4, 5 strong
    String.raw`(?<![\w*])\*(?![\s*])(.+?)(?<![\s*])\*(?!\*)`, // 6 emphasis
    String.raw`(?<!\w)_(?![\s_])(.+?)(?<![\s_])_(?!\w)`, // 7 emphasis
    String.raw`~~(?=\S)(.+?)(?<=\S)~~`, // 8 struck out
    String.raw`!?\[([^\[\]]*)\]\(\s*([^()\s]+)(?:\s+"[^"]*")?\s*\)`, // 9, 10 link
    String.raw`(https?:\/\/[^\s<>"'\`]*[^\s<>"'\`.,;:!?)\]*_])`, // 11 address
  ].join('|'),
  'gs',
);
const DEEPEST = 8;
const LONGEST_PARAGRAPH = 5000;

const shown = new WeakMap();

/** Show `text` in `container`, touching only what changed since the last call. */
export function render(container, text) {
  const before = shown.get(container) ?? [];
  const now = blocksOf(text.replaceAll('\r\n', '\n').split('\n'), 0);
  let same = 0;
  while (same < before.length && same < now.length && before[same] === now[same].key) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...now.slice(same).map((block) => block.make()));
  shown.set(container, now.map((block) => block.key));
}

/** A block is what it was made from (its key), and the way to make it. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  const add = (kind, end, make) => {
    blocks.push({ key: `${kind}\n${lines.slice(at, end).join('\n')}`, make });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const end = endOfFence(lines, at + 1, fence[1]);
      const code = lines.slice(at + 1, end).join('\n');
      add('code', Math.min(end + 1, lines.length), () => codeBlock(fence[2], code));
    } else if (heading) {
      const level = Math.min(6, heading[1].length + 2);
      add('heading', at + 1, () => el(`h${level}`, {}, ...inline(heading[2], 0)));
    } else if (RULE.test(line)) add('rule', at + 1, () => el('hr'));
    else if (depth < DEEPEST && /^ {0,3}>/.test(line)) {
      const end = endWhere(lines, at, (next) => !/^ {0,3}>/.test(next));
      const inner = lines.slice(at, end).map((each) => each.replace(/^ {0,3}> ?/, ''));
      add('quote', end, () => el('blockquote', {}, ...made(inner, depth)));
    } else if (depth < DEEPEST && ITEM.test(line)) {
      const end = endOfList(lines, at);
      const inner = lines.slice(at, end);
      add('list', end, () => listOf(inner, depth));
    } else if (line.includes('|') && DIVIDER.test(lines[at + 1] ?? '') && lines[at + 1].includes('-')) {
      const end = endWhere(lines, at + 2, (next) => !next.includes('|'));
      const rows = lines.slice(at, end);
      add('table', end, () => tableOf(rows));
    } else {
      const end = endWhere(lines, at + 1, (next, index) => !next.trim() || beginsBlock(lines, index, depth));
      const paragraph = lines.slice(at, end).join('\n');
      add('paragraph', end, () => el('p', {}, ...inline(paragraph, 0)));
    }
  }
  return blocks;
}

const made = (lines, depth) => blocksOf(lines, depth + 1).map((block) => block.make());

function endWhere(lines, from, isEnd) {
  let end = from;
  while (end < lines.length && !isEnd(lines[end], end)) end += 1;
  return end;
}

function endOfFence(lines, from, fence) {
  return endWhere(lines, from, (line) => {
    const mark = line.trim();
    return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
  });
}

function beginsBlock(lines, index, depth) {
  const line = lines[index];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return depth < DEEPEST && (/^ {0,3}>/.test(line) || /^ {0,3}(?:[-*+]|1[.)])\s+\S/.test(line));
}

function endOfList(lines, from) {
  const [, indent, mark] = ITEM.exec(lines[from]);
  const ordered = /\d/.test(mark);
  return endWhere(lines, from + 1, (line, index) => {
    if (!line.trim()) {
      const next = lines.slice(index).find((each) => each.trim());
      return next === undefined || !(belongs(next, indent.length, ordered));
    }
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) return !belongs(line, indent.length, ordered);
    return !item && !/^\s/.test(line) && (!lines[index - 1].trim() || beginsBlock(lines, index, 0));
  });
}

function belongs(line, indent, ordered) {
  const item = ITEM.exec(line);
  if (item && item[1].length <= indent) return item[1].length === indent && /\d/.test(item[2]) === ordered;
  return /^\s/.test(line) && line.search(/\S/) > indent;
}

function listOf(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length === indent.length) {
      items.push({ inset: item[1].length + item[2].length + 1, lines: [item[3] ?? ''] });
    } else {
      const last = items.at(-1);
      const leading = Math.max(0, line.search(/\S|$/));
      last.lines.push(line.slice(Math.min(leading, last.inset)));
    }
  }
  const ordered = /\d/.test(mark);
  const start = ordered ? Number.parseInt(mark, 10) : null;
  return el(ordered ? 'ol' : 'ul', { start: start === 1 ? null : start },
    ...items.map((item) => el('li', {}, ...made(item.lines, depth))));
}

function tableOf([head, , ...rows]) {
  const cells = (row) => row.trim().replace(/^\||(?<!\\)\|$/g, '').split(/(?<!\\)\|/).map((cell) => cell.trim());
  const titles = cells(head);
  const line = (row) => el('tr', {}, ...titles.map((_, column) => el('td', {}, ...inline(cells(row)[column] ?? '', 0))));
  return el('div', { class: 'table', tabindex: '0' }, el('table', {},
    el('thead', {}, el('tr', {}, ...titles.map((title) => el('th', { scope: 'col' }, ...inline(title, 0))))),
    el('tbody', {}, ...rows.map(line))));
}

function codeBlock(language, code) {
  return el('figure', { class: 'code' },
    el('figcaption', {}, el('span', {}, language || 'code'), copyButton(() => code)),
    el('pre', { tabindex: '0' }, el('code', {}, code)));
}

/** A button that copies what `text` gives; null where the browser has no clipboard for this page. */
export function copyButton(text) {
  if (!navigator.clipboard) return null;
  const label = el('span', {}, 'Copy');
  return el('button', {
    type: 'button',
    class: 'small',
    onclick: async () => {
      await navigator.clipboard.writeText(text());
      label.textContent = 'Copied';
      setTimeout(() => { label.textContent = 'Copy'; }, 2000);
    },
  }, icon('copy'), label);
}

/** Elements and texts for a line or a paragraph. */
function inline(text, depth) {
  if (depth > DEEPEST || text.length > LONGEST_PARAGRAPH) return [text];
  const out = [];
  let from = 0;
  const within = (inner) => inline(inner, depth + 1);
  for (const match of text.matchAll(INLINE)) {
    const [all, escaped, , code, , strong, starred, underlined, struck, label, target, address] = match;
    out.push(text.slice(from, match.index));
    from = match.index + all.length;
    if (escaped !== undefined) out.push(escaped);
    else if (code !== undefined) out.push(el('code', {}, code));
    else if (strong !== undefined) out.push(el('strong', {}, ...within(strong)));
    else if (starred ?? underlined) out.push(el('em', {}, ...within(starred ?? underlined)));
    else if (struck !== undefined) out.push(el('s', {}, ...within(struck)));
    else if (address !== undefined) out.push(link(address, [address]) ?? address);
    else out.push(link(target, all.startsWith('!') ? [label || target] : within(label)) ?? all);
  }
  return [...out, text.slice(from)].filter((part) => part !== '');
}

function link(target, children) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(target)) return null;
  return el('a', { href: target, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...children);
}
