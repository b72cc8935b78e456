// The options of a chat, and the dialogs for them and for the API key.

import { apiKey, setApiKey } from './api.js';
import { byId, store, stored } from './dom.js';

const APPEARANCE = 'darkbloom.appearance';

let current = { instructions: '', request: {} };

/** `instructions` is the system message, `request` what else goes into a request's body. */
export const options = () => current;

/** Wire the dialogs up. `keyChanged` is called when another key is to be used. */
export function startOptions(keyChanged) {
  for (const dialog of document.querySelectorAll('dialog')) {
    dialog.querySelector('[data-close]').addEventListener('click', () => dialog.close());
    dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  }
  byId('open-options').addEventListener('click', () => byId('options').showModal());
  byId('options').querySelector('form').addEventListener('submit', (event) => {
    event.preventDefault();
    const fault = takeOptions();
    byId('options-fault').textContent = fault;
    byId('options-fault').hidden = !fault;
    if (!fault) byId('options').close();
  });
  byId('open-key').addEventListener('click', () => {
    byId('options').close();
    enterKey();
  });
  byId('key-dialog').querySelector('form').addEventListener('submit', (event) => {
    event.preventDefault();
    setApiKey(byId('key').value.trim(), byId('key-keep').checked);
    byId('key-dialog').close();
    keyChanged();
  });
  byId('appearance').value = stored('localStorage', APPEARANCE) ?? '';
  byId('appearance').addEventListener('change', showAppearance);
  showAppearance();
}

/** Show where the API key is entered, and what is wrong with the one that was. */
export function enterKey(fault = '') {
  byId('key').value = apiKey();
  byId('key-fault').textContent = apiKey() && fault;
  byId('key-fault').hidden = !apiKey() || !fault;
  if (!byId('key-dialog').open) byId('key-dialog').showModal();
}

function showAppearance() {
  const chosen = byId('appearance').value;
  document.documentElement.dataset.appearance = chosen;
  store('localStorage', APPEARANCE, chosen || null);
}

/** Read the form. Gives what is wrong with it, or an empty text. */
function takeOptions() {
  const request = {};
  const number = (id) => (byId(id).value === '' ? undefined : Number(byId(id).value));
  request.temperature = number('temperature');
  request.max_tokens = number('max-tokens');
  request.reasoning_effort = byId('effort').value || undefined;
  try {
    request.tools = readTools(byId('tools').value);
  } catch (error) {
    return `Tools: ${error.message}`;
  }
  current = { instructions: byId('instructions').value.trim(), request };
  return '';
}

/** Functions as they are, or wrapped as OpenAI's API wants them. */
function readTools(text) {
  if (!text.trim()) return undefined;
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error('a JSON list is expected, such as [{"name": "get_weather"}]');
  return tools.map((tool) => (tool.type === 'function' ? tool : { type: 'function', function: tool }));
}
