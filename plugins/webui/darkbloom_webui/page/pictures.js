// Pictures that go with the next message: chosen, pasted or dropped, shown until they are sent or taken away.

import { announce, byId, counted, el, icon, size } from './dom.js';

const LARGEST_BYTES = 20 * 1024 * 1024;

let chosen = [];

/** Listen for pictures. */
export function startPictures() {
  const input = byId('picture-files');
  const message = byId('message');
  const box = byId('composer').querySelector('.box');
  byId('add-pictures').addEventListener('click', () => input.click());
  input.addEventListener('change', () => {
    const files = [...input.files];
    input.value = '';
    addFiles(files);
    message.focus();
  });
  message.addEventListener('paste', (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    addFiles(files);
  });
  document.addEventListener('dragover', (event) => {
    if (![...event.dataTransfer.types].includes('Files')) return;
    event.preventDefault();
    box.classList.add('drop');
  });
  document.addEventListener('dragleave', (event) => {
    if (!event.relatedTarget) box.classList.remove('drop');
  });
  document.addEventListener('drop', (event) => {
    box.classList.remove('drop');
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    addFiles([...event.dataTransfer.files]);
    message.focus();
  });
}

/** How many pictures wait to be sent. */
export const pictureCount = () => chosen.length;

/** The pictures that wait, as {name, url} with data: URIs; none wait afterwards. */
export function takePictures() {
  const taken = chosen;
  chosen = [];
  refuse('');
  show();
  return taken;
}

function refuse(why) {
  byId('refused').textContent = why;
  byId('refused').hidden = !why;
}

async function addFiles(files) {
  refuse('');
  for (const file of files) {
    if (!file.type.startsWith('image/')) refuse(`${file.name} is no picture.`);
    else if (file.size > LARGEST_BYTES) refuse(`${file.name} has ${size(file.size)}; pictures of up to ${size(LARGEST_BYTES)} can be sent.`);
    else {
      try {
        chosen.push({ name: file.name || 'picture', url: await dataUri(file) });
      } catch {
        refuse(`${file.name} could not be read.`);
      }
    }
  }
  show();
  if (chosen.length) announce(`${counted(chosen.length, 'picture')} will be sent.`);
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  const list = byId('pictures');
  list.replaceChildren(...chosen.map((picture, index) => el('li', {},
    el('img', { src: picture.url, alt: picture.name }),
    el('button', {
      type: 'button',
      title: `Remove ${picture.name}`,
      onclick: () => {
        chosen.splice(index, 1);
        show();
        byId('message').focus();
      },
    }, icon('close'), el('span', { class: 'unseen' }, `Remove ${picture.name}`)))));
  list.hidden = chosen.length === 0;
  list.dispatchEvent(new Event('change', { bubbles: true }));
}
