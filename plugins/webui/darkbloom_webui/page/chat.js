// The chat: sends questions, streams answers, one at a time.

import { Fault, getJson, streamChat } from './api.js';
import { ended, keep, kept, messagesOf, newAnswer, saidNothing, takeChunk } from './conversation.js';
import { announce, byId, count, el, store, stored } from './dom.js';
import { options } from './options.js';
import { pictureCount, startPictures, takePictures } from './pictures.js';
import { TurnView } from './turns.js';

const MODEL = 'darkbloom.model';
const SUGGESTIONS = ['What is the capital of France?', 'What is 47 + 38?', 'List the days of the week.'];
const NEAR_END_PIXELS = 120;
const GROWS = CSS.supports('field-sizing', 'content'); // else the message box is given its rows
const MOST_ROWS = 10;

const message = byId('message');
const conversation = byId('conversation');

let turns = [];
let views = [];
let models = null; // as the server told them, once it has
let running = null; // the AbortController of the answer that is being streamed
let askForKey = () => {};

/** Wire the chat up. `enterKey` shows where the API key is entered. */
export function startChat(enterKey) {
  askForKey = enterKey;
  startPictures();
  byId('pictures').addEventListener('change', showState);
  byId('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    sendMessage();
  });
  message.addEventListener('input', showState);
  message.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendMessage();
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && running && !document.querySelector('dialog[open]')) stop();
  });
  byId('stop').addEventListener('click', stop);
  byId('new-chat').addEventListener('click', startAnew);
  byId('model').addEventListener('change', () => {
    store('localStorage', MODEL, byId('model').value);
    showModel();
  });
  byId('to-latest').addEventListener('click', () => scrollToEnd(true));
  window.addEventListener('scroll', showState, { passive: true });
  byId('suggestions').append(...SUGGESTIONS.map((text) => el('li', {}, el('button', {
    type: 'button',
    onclick: () => {
      message.value = text;
      sendMessage();
    },
  }, text))));
  turns = kept();
  for (const turn of turns) addView(turn);
  showState();
  scrollToEnd();
}

/** Ask the server which models it has; the one chosen before stays chosen. */
export async function loadModels() {
  let found;
  try {
    found = (await getJson('v1/models')).data;
  } catch (fault) {
    if (!models) byId('welcome-model').textContent = `${fault.title}: ${fault.message}`;
    if (fault.status === 401) askForKey(fault.message);
    return;
  }
  if (JSON.stringify(found) === JSON.stringify(models)) return; // an open list must not be disturbed
  models = found;
  const select = byId('model');
  const wanted = select.value || stored('localStorage', MODEL);
  select.replaceChildren(...models.map(({ id }) => el('option', { value: id, selected: id === wanted }, id)));
  select.disabled = models.length === 0;
  showModel();
}

function showModel() {
  const model = models?.find(({ id }) => id === byId('model').value);
  const sees = model?.modalities?.includes('image') ?? true;
  byId('welcome-title').textContent = model ? `Ask ${model.id}` : 'No model';
  byId('welcome-model').textContent = model
    ? [`Context of ${count(model.context_length)} tokens`, model.modalities && (sees ? 'reads text and pictures' : 'reads text')]
      .filter(Boolean).join(' · ')
    : 'This server has no model to ask.';
  byId('suggestions').hidden = !model;
  message.placeholder = model ? `Message ${model.id}` : 'Write a message';
  byId('add-pictures').disabled = !sees;
  byId('add-pictures').title = sees ? 'Add pictures' : `${model.id} does not see pictures`;
  showState();
}

function sendMessage() {
  const text = message.value.trim();
  if (running || !byId('model').value || (!text && !pictureCount())) return;
  message.value = '';
  ask({ text, pictures: takePictures() });
}

/** Ask `question` and stream its answer below what was said before. */
function ask(question) {
  const turn = { question, answer: newAnswer(byId('model').value) };
  turns.push(turn);
  addView(turn);
  stream(turn);
}

/** Answer the last question again, with the model that is chosen now. */
function again() {
  if (running || !turns.length) return;
  const turn = turns.at(-1);
  turn.answer = newAnswer(byId('model').value || turn.answer.model);
  const old = views.pop();
  const view = addView(turn);
  old.element.replaceWith(view.element);
  message.focus();
  stream(turn);
}

function addView(turn) {
  views.at(-1)?.update(false);
  const actions = {
    again,
    enterKey: () => askForKey(turn.answer.fault.message),
    sendResults: (results) => { if (!running) { message.focus(); ask({ results }); } },
  };
  const view = new TurnView(turn, actions);
  views.push(view);
  conversation.append(view.element);
  return view;
}

async function stream(turn) {
  const { answer } = turn;
  const view = views.at(-1);
  const began = performance.now();
  running = new AbortController();
  let frame = 0;
  const show = () => {
    frame = 0;
    const follow = isNearEnd();
    view.update();
    if (follow) scrollToEnd();
  };
  showState();
  scrollToEnd(true);
  announce('The model is answering.');
  try {
    const body = { model: answer.model, messages: messagesOf(turns, options().instructions), ...options().request };
    for await (const { chunk, readAt } of streamChat(body, running.signal)) {
      if (!takeChunk(answer, chunk, readAt - began)) continue;
      answer.state = 'streaming';
      frame ||= requestAnimationFrame(show);
    }
    answer.state = 'done';
  } catch (error) {
    fail(answer, error);
  }
  cancelAnimationFrame(frame);
  running = null;
  show();
  keep(turns);
  showState();
  tellEnd(answer);
}

function fail(answer, error) {
  if (running.signal.aborted) {
    answer.state = 'stopped';
    return;
  }
  const fault = error instanceof Fault ? error : new Fault(500, `The page could not read the answer: ${error.message}`);
  answer.state = 'failed';
  answer.fault = { title: fault.title, message: fault.message, status: fault.status, waitSeconds: fault.waitSeconds };
}

function tellEnd(answer) {
  if (answer.fault) announce(`${answer.fault.title}. ${answer.fault.message}`);
  else if (answer.state === 'stopped') announce('Stopped.');
  else if (answer.calls.length) announce(`${answer.model} calls ${answer.calls.map(({ name }) => name).join(', ')}.`);
  else announce(saidNothing(answer) ? 'The answer is empty.' : `${answer.model} answered: ${answer.content}`);
}

function stop() {
  running?.abort();
  message.focus();
}

function startAnew() {
  running?.abort();
  turns = [];
  views = [];
  conversation.replaceChildren();
  keep(turns);
  showState();
  message.focus();
  announce('New chat.');
}

const isNearEnd = () =>
  document.documentElement.scrollHeight - window.scrollY - window.innerHeight < NEAR_END_PIXELS;

function scrollToEnd(smoothly = false) {
  const still = window.matchMedia('(prefers-reduced-motion: reduce)').matches;
  window.scrollTo({ top: document.documentElement.scrollHeight, behavior: smoothly && !still ? 'smooth' : 'instant' });
}

function showState() {
  if (!GROWS) message.rows = Math.min(MOST_ROWS, message.value.split('\n').length);
  const empty = turns.length === 0;
  byId('welcome').hidden = !empty;
  conversation.hidden = empty;
  byId('new-chat').disabled = empty;
  byId('send').hidden = Boolean(running);
  byId('stop').hidden = !running;
  byId('send').disabled = !byId('model').value || (!message.value.trim() && !pictureCount());
  byId('to-latest').hidden = empty || isNearEnd() || byId('chat').hidden;
}
