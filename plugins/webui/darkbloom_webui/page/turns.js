// Shows turns. A view follows its turn's data: call update() after any change of it.

import { ended, saidNothing, tokensPerSecond } from './conversation.js';
import { count, counted, el, icon, seconds } from './dom.js';
import { copyButton, render } from './markdown.js';

const LONG_QUESTION = 800; // from here on it may have to be scrolled

const ENDINGS = {
  stopped: 'Stopped.',
  length: 'The answer was cut: it reached the largest number of tokens.',
};

/** A turn as an element. `actions` has again(), sendResults(results) and enterKey(). */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.thoughts = el('details', { class: 'thoughts', hidden: true }, el('summary', {}), el('div', { class: 'plain' }));
    this.text = el('div', { class: 'text' });
    this.calls = el('div', { class: 'calls' });
    this.end = el('div', { class: 'end' });
    this.waiting = el('p', { class: 'waiting' }, el('span', { class: 'unseen' }, 'Waiting for the first word'), el('i'), el('i'), el('i'));
    this.answer = el('article', { class: 'answer' },
      el('h2', {}, turn.answer.model, el('span', { class: 'unseen' }, ' answered')),
      this.waiting, this.thoughts, this.text, this.calls, this.end);
    this.element = el('div', { class: 'turn' }, questionElement(turn.question), this.answer);
    this.update();
  }

  /** Show the turn as it is now; `isLast` says whether it can be answered again. */
  update(isLast = this.isLast ?? true) {
    this.isLast = isLast;
    const { answer } = this.turn;
    this.answer.setAttribute('aria-busy', String(!ended(answer)));
    this.waiting.hidden = ended(answer) || Boolean(answer.reasoning) || !saidNothing(answer);
    this.showThoughts(answer);
    render(this.text, answer.content);
    this.showCalls(answer, isLast);
    this.end.replaceChildren(...(ended(answer) ? this.ending(answer, isLast) : []));
  }

  showThoughts(answer) {
    const [summary, plain] = this.thoughts.children;
    this.thoughts.hidden = !answer.reasoning;
    const thinking = !ended(answer) && saidNothing(answer);
    this.thoughts.classList.toggle('now', thinking);
    const tokens = answer.usage?.completion_tokens_details?.reasoning_tokens;
    const said = thinking ? 'Thinking…' : tokens ? `Thought for ${counted(tokens, 'token')}` : 'Thoughts';
    if (summary.textContent !== said) summary.textContent = said;
    if (plain.textContent !== answer.reasoning) plain.textContent = answer.reasoning;
  }

  showCalls(answer, isLast) {
    const open = isLast && answer.state === 'done' && answer.calls.length > 0;
    const state = JSON.stringify([answer.calls, open]);
    if (this.callsShown === state) return;
    this.callsShown = state;
    const cards = answer.calls.map((call, index) => callCard(call, open ? index : null));
    if (!open) {
      this.calls.replaceChildren(...cards);
      return;
    }
    const form = el('form', {
      onsubmit: (event) => {
        event.preventDefault();
        const texts = [...form.querySelectorAll('textarea')].map((area) => area.value);
        this.actions.sendResults(answer.calls.map(({ id, name }, index) => ({ id, name, text: texts[index] })));
      },
    }, ...cards, el('button', { type: 'submit', class: 'strong' }, cards.length > 1 ? 'Send the results' : 'Send the result'));
    this.calls.replaceChildren(form);
  }

  ending(answer, isLast) {
    const parts = [];
    const note = ENDINGS[answer.state] ?? ENDINGS[answer.finish];
    if (answer.fault) parts.push(this.faultCard(answer.fault, isLast));
    else if (note) parts.push(el('p', { class: 'note' }, note));
    else if (saidNothing(answer)) parts.push(el('p', { class: 'note' }, 'The answer is empty.'));
    const buttons = [];
    if (answer.content) buttons.push(copyButton(() => answer.content));
    if (isLast && !answer.fault) {
      buttons.push(el('button', { type: 'button', class: 'small again', onclick: this.actions.again }, icon('again'), 'Answer again'));
    }
    const figures = figuresOf(answer);
    if (figures || buttons.length) parts.push(el('div', { class: 'foot' }, ...buttons, figures && el('p', { class: 'figures' }, figures)));
    return parts;
  }

  faultCard(fault, isLast) {
    const wait = fault.waitSeconds ? `It asks to wait ${counted(fault.waitSeconds, 'second')}.` : '';
    const card = el('div', { class: 'fault' },
      el('p', {}, el('strong', {}, fault.title)), el('p', {}, `${fault.message} ${wait}`));
    if (isLast) {
      card.append(el('div', { class: 'foot' },
        fault.status === 401 && el('button', { type: 'button', onclick: this.actions.enterKey }, 'Enter the API key'),
        el('button', { type: 'button', class: 'again', onclick: this.actions.again }, icon('again'), 'Try again')));
    }
    return card;
  }
}

function questionElement({ text, pictures = [], results }) {
  const title = el('h2', { class: 'unseen' }, results ? 'Results of tools' : 'You asked');
  if (results) {
    return el('article', { class: 'question results' }, title, ...results.map((result) => el('p', {},
      el('strong', {}, result.name), ' ', el('code', {}, result.text))));
  }
  return el('article', { class: 'question' }, title,
    pictures.length > 0 && el('div', { class: 'sent-pictures' }, ...pictures.map(({ name, url }) => el('img', { src: url, alt: name }))),
    text && el('p', { class: 'plain', tabindex: text.length > LONG_QUESTION ? '0' : null }, text));
}

/** A call with its arguments; with an index also the field where its result is written. */
function callCard(call, index) {
  const card = el('div', { class: 'call' },
    el('p', { class: 'call-name' }, icon('tool'), el('span', {}, 'Calls ', el('code', {}, call.name))),
    el('pre', { tabindex: '0' }, el('code', {}, pretty(call.arguments))));
  if (index === null) return card;
  const id = `result-${index}`;
  card.append(el('label', { for: id }, `Result of ${call.name}`), el('textarea', { id, class: 'code', rows: '2', required: true, spellcheck: 'false' }));
  return card;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Token counts and speed in a line, as far as they are known. */
function figuresOf(answer) {
  const { usage, firstMilliseconds } = answer;
  if (!usage) return '';
  const figures = [counted(usage.completion_tokens, 'token')];
  const speed = tokensPerSecond(answer);
  if (speed) figures.push(`${count(speed)} tokens/s`);
  if (firstMilliseconds !== null) figures.push(`first after ${seconds(firstMilliseconds)}`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  figures.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} of it cached` : ''}`);
  return figures.join(' · ');
}
