// What was said so far, as data: a list of turns, each a question and its answer.
//
// A question has a text and pictures, or the results of the tools that the answer before called.
// An answer's state is "waiting", "streaming", "done", "stopped" or "failed".

import { store, stored } from './dom.js';

const KEPT = 'darkbloom.conversation';

export function newAnswer(model) {
  return {
    model, state: 'waiting', reasoning: '', content: '', calls: [], fault: null, finish: null,
    usage: null, parts: 0, firstParts: 0, firstMilliseconds: null, milliseconds: null,
  };
}

export const ended = (answer) => !['waiting', 'streaming'].includes(answer.state);
export const saidNothing = (answer) => !answer.content && !answer.calls.length;

/** Take what a chunk of a stream brings, that long after the request. Gives whether there was anything to show. */
export function takeChunk(answer, chunk, milliseconds) {
  if (chunk.usage) answer.usage = chunk.usage;
  const [choice] = chunk.choices;
  if (!choice) return false;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
  answer.content += content ?? '';
  answer.reasoning += reasoning ?? '';
  for (const call of calls) {
    answer.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: '' };
    answer.calls[call.index].arguments += call.function.arguments ?? '';
  }
  if (!content && !reasoning && !calls.length) return false;
  answer.firstMilliseconds ??= milliseconds;
  answer.milliseconds = milliseconds;
  answer.parts += 1;
  if (milliseconds === answer.firstMilliseconds) answer.firstParts += 1;
  return true;
}

/** Tokens a second after the first that were read, or null: what came with the first took no time that can be seen. */
export function tokensPerSecond({ usage, parts, firstParts, firstMilliseconds, milliseconds }) {
  if (!usage || parts === firstParts) return null;
  const tokens = (usage.completion_tokens * (parts - firstParts)) / parts;
  return (1000 * tokens) / (milliseconds - firstMilliseconds);
}

/** The messages of a request for the answer of the last turn. Turns without any answer are left out. */
export function messagesOf(turns, instructions) {
  const messages = instructions ? [{ role: 'system', content: instructions }] : [];
  turns.forEach((turn, index) => {
    const last = index === turns.length - 1;
    if (!last && saidNothing(turn.answer)) return;
    messages.push(...questionMessages(turn.question));
    if (!last) messages.push(answerMessage(turn.answer, turns[index + 1].question.results));
  });
  return messages;
}

function questionMessages({ text, pictures, results }) {
  if (results) return results.map(({ id, text: content }) => ({ role: 'tool', tool_call_id: id, content }));
  if (!pictures.length) return [{ role: 'user', content: text }];
  const parts = pictures.map(({ url }) => ({ type: 'image_url', image_url: { url } }));
  return [{ role: 'user', content: text ? [...parts, { type: 'text', text }] : parts }];
}

/** Calls are told again only with their results. */
function answerMessage(answer, results) {
  const message = { role: 'assistant', content: answer.content };
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (results) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => (
      { id, type: 'function', function: { name, arguments: text } }));
  }
  return message;
}

/** Keep the conversation until this tab is closed. One that does not fit is not kept. */
export function keep(turns) {
  if (!turns.length) {
    store('sessionStorage', KEPT, null);
    return;
  }
  store('sessionStorage', KEPT, JSON.stringify(turns));
}

/** The conversation that this tab kept. An answer that was cut short by leaving the page is "stopped". */
export function kept() {
  try {
    const turns = JSON.parse(stored('sessionStorage', KEPT)) ?? [];
    for (const { answer } of turns) if (!ended(answer)) answer.state = 'stopped';
    return turns;
  } catch {
    return [];
  }
}
