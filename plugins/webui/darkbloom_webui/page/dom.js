// Small helpers to make elements. Text always becomes a text node: nothing here reads HTML.

const SVG = 'http://www.w3.org/2000/svg';

/** An element with attributes, listeners ("onclick") and children (elements or text). */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false && child !== ''));
  return element;
}

/** One of the symbols of the page, for decoration only. */
export function icon(name) {
  const picture = document.createElementNS(SVG, 'svg');
  picture.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#icon-${name}`);
  picture.append(use);
  return picture;
}

export const byId = (id) => document.getElementById(id);

/** Say something to those who do not see the page, once nothing else is being said. */
export function announce(text) {
  byId('announcer').textContent = text;
}

const BYTES = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];

/** 13.7 GiB */
export function size(bytes) {
  let step = 0;
  let value = bytes;
  while (value >= 1024 && step < BYTES.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${step === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${BYTES[step]}`;
}

/** 1,234 */
export const count = (number) => Math.round(number).toLocaleString('en-US');

/** "1 token", "2 tokens" */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;

/** 0.05 s */
export const seconds = (milliseconds) =>
  `${milliseconds < 9950 ? (milliseconds / 1000).toPrecision(2) : Math.round(milliseconds / 1000)} s`;

/** A value of the browser's storage, null where that is refused or empty. */
export function stored(area, key) {
  try {
    return window[area].getItem(key);
  } catch {
    return null;
  }
}

/** Keep or, with null, forget a value. What does not fit is forgotten. */
export function store(area, key, value) {
  try {
    window[area].removeItem(key);
    if (value !== null) window[area].setItem(key, value);
  } catch {
    // The storage is full or refused: the page works without.
  }
}
