// The view of the server: its models with their shares of memory, and its plugins.
//
// What the server does not tell, or not without a key, is left out; the rest is still shown.

import { getJson } from './api.js';
import { byId, count, counted, el, size } from './dom.js';

const REFRESH_MILLISECONDS = 2000;

let timer = 0;
const drawn = new Map();

/** Show the view and keep it fresh, or stop doing so. */
export function showServer(visible) {
  clearInterval(timer);
  if (!visible) return;
  refresh();
  timer = setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MILLISECONDS);
}

async function refresh() {
  const told = (path, options) => getJson(path, options).catch((fault) => fault);
  const [models, readiness, capacity, plugins] = await Promise.all([
    told('v1/models'), told('health/ready', { anyStatus: true }), told('v1/capacity'), told('webui/plugins'),
  ]);
  showFault([models, readiness].find((each) => each instanceof Error));
  if (models instanceof Error) return;
  const ready = { status: 'unknown', slots: [], ...(readiness instanceof Error ? {} : readiness) };
  const shares = capacity instanceof Error ? [] : (capacity.slots ?? []);
  draw('server-state', [stateText(ready, models.data.length)]);
  draw('memory', memoryOf(shares));
  draw('slots', models.data.map((model) => slotCard(
    model, ready.slots.find((slot) => slot.model === model.id), shares.find((slot) => slot.model === model.id))));
  draw('plugins', plugins instanceof Error ? failedPlugins(ready) : plugins.plugins.map(pluginCard));
}

function showFault(fault) {
  const box = byId('server-fault');
  box.hidden = !fault;
  const said = fault ? `${fault.title}. ${fault.message}` : '';
  if (box.textContent !== said) box.textContent = said;
}

/** Replace what stands in `id`, unless it is the same: a reader or a selection must not be disturbed. */
function draw(id, parts) {
  const before = drawn.get(id);
  const now = el('div', {}, ...parts);
  if (before?.isEqualNode(now)) return;
  drawn.set(id, now.cloneNode(true));
  byId(id).replaceChildren(...now.childNodes);
}

function stateText(ready, known) {
  const running = ready.slots.reduce((sum, slot) => sum + slot.running, 0);
  const waiting = ready.slots.reduce((sum, slot) => sum + slot.waiting, 0);
  const states = {
    ready: 'Ready', draining: 'Shutting down: running requests may finish', 'not ready': 'Not ready: no model serves',
    unknown: 'The state is not known',
  };
  const serving = ready.slots.filter((slot) => slot.state === 'serving').length;
  return `${states[ready.status] ?? ready.status} · ${serving} of ${counted(known, 'model')} in memory · `
    + `${counted(running, 'request')} running, ${count(waiting)} waiting`;
}

// --- memory --------------------------------------------------------------------

const shareOf = (slot) => (slot.token_budget ?? 0) * (slot.kv_bytes_per_token ?? 0);

/** How KV memory is divided among the models that are loaded. */
function memoryOf(shares) {
  const whole = shares.reduce((sum, slot) => sum + shareOf(slot), 0);
  if (!whole) return [];
  const parts = shares.filter(shareOf).map((slot, index) => {
    const percent = (100 * shareOf(slot)) / whole;
    return { name: slot.model, percent, colour: `share-${index % 4}`, text: `${size(shareOf(slot))}, ${percent.toFixed(0)} %` };
  });
  return [
    el('p', { class: 'label' }, `KV memory, ${size(whole)}, is divided among the models in memory`),
    bar(parts.map(({ percent, colour }) => ({ percent, colour }))),
    el('ul', { class: 'legend' }, ...parts.map(({ name, colour, text }) => el('li', {},
      el('i', { class: colour }), el('span', {}, name), ' ', el('span', { class: 'quiet' }, text)))),
  ];
}

/** A bar of parts in percent; what it says stands beside it as text. */
function bar(parts) {
  const drawing = el('div', { class: 'bar', 'aria-hidden': 'true' });
  for (const { percent, colour } of parts) {
    const part = el('i', { class: colour });
    part.style.flexBasis = `${percent.toFixed(2)}%`;
    drawing.append(part);
  }
  return drawing;
}

// --- models --------------------------------------------------------------------

function slotCard(model, slot, share) {
  const state = !slot ? 'not loaded' : !slot.healthy ? 'not healthy' : slot.activity === 'running' ? 'running' : slot.state;
  const tone = !slot ? 'off' : !slot.healthy || slot.state === 'failed' ? 'bad' : slot.state === 'serving' ? 'good' : 'busy';
  const about = [
    model.owned_by, `context of ${count(model.context_length)} tokens`, model.modalities && `reads ${model.modalities.join(', ')}`,
  ];
  const facts = [
    slot && ['Running', share ? `${slot.running} of ${share.max_rows}` : slot.running],
    slot && ['Waiting', slot.waiting],
    share?.load_seconds && ['Loaded in', `${share.load_seconds.toPrecision(2)} s`],
    share?.decode_rate && ['Decode', `${count(share.decode_rate)} tokens/s`],
    share?.prefill_rate && ['Prefill', `${count(share.prefill_rate)} tokens/s`],
  ];
  return el('li', { class: 'card' },
    el('h3', {}, el('span', {}, model.id), el('span', { class: `badge ${tone}` }, state)),
    el('p', { class: 'quiet' }, about.filter(Boolean).join(' · ')),
    slot ? null : el('p', { class: 'quiet' }, 'It is loaded when it is asked for.'),
    ...budget(share),
    factList(facts));
}

/** What of the share's tokens is promised to requests, and what of that is in use. */
function budget(share) {
  if (!share?.token_budget) return [];
  const { token_budget: whole, committed_tokens: committed = 0, active_tokens: active = 0 } = share;
  const percent = (tokens) => Math.min(100, (100 * tokens) / whole);
  return [
    el('p', { class: 'label' }, `${size(shareOf(share))} of KV memory, room for ${count(whole)} tokens`),
    bar([
      { percent: percent(active), colour: 'used' },
      { percent: percent(Math.max(0, committed - active)), colour: 'promised' },
    ]),
    el('p', { class: 'label quiet' }, `${count(active)} in use, ${count(committed)} promised to requests`),
  ];
}

function factList(facts) {
  return el('dl', {}, ...facts.filter(Boolean).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
}

// --- plugins -------------------------------------------------------------------

const HOOKS = {
  model_families: 'models', checkpoints: 'checkpoints', cache_tiers: 'cache tier', telemetry_sinks: 'telemetry',
  server_routes: 'routes', cli_commands: 'commands',
};

function pluginCard(plugin) {
  const from = [plugin.distribution, plugin.version].filter(Boolean).join(' ');
  const adds = plugin.hooks.map((hook) => HOOKS[hook] ?? hook).join(', ');
  return el('li', { class: 'card' },
    el('h3', {}, el('span', {}, plugin.name), el('span', { class: `badge ${plugin.failed ? 'bad' : plugin.state === 'loaded' ? 'good' : 'off'}` }, plugin.state)),
    el('p', { class: 'quiet' }, [from, adds && `adds ${adds}`].filter(Boolean).join(' · ')),
    plugin.reason ? el('p', { class: plugin.failed ? 'fault' : '' }, plugin.reason) : null,
    plugin.notice ? el('p', {}, plugin.notice) : null);
}

/** Readiness names those that failed, where the list of all is not told. */
function failedPlugins(ready) {
  const failed = ready.failed_plugins ?? [];
  if (!failed.length) return [el('li', { class: 'quiet' }, 'The list of plugins is not available here; none has failed.')];
  return failed.map((plugin) => pluginCard({ ...plugin, hooks: [], failed: true }));
}
