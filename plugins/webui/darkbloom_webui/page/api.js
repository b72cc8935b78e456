// Talks to the server, and to nobody else. Every fault becomes a Fault that says what to do.

import { store, stored } from './dom.js';

const KEY = 'darkbloom.key';
const BROKEN_OFF = 'The connection ended before the answer did.';

/** A request that failed. `status` is 0 where there was no answer at all, null where it broke off. */
export class Fault extends Error {
  constructor(status, message, waitSeconds = null) {
    super(message);
    this.status = status;
    this.waitSeconds = waitSeconds;
  }

  /** A few words that stand above the message. */
  get title() {
    if (this.status === null) return 'The answer broke off';
    if (this.status === 0) return 'The server cannot be reached';
    if (this.status === 401) return 'The server asks for an API key';
    if (this.status === 413) return 'This is too large for the server';
    if (this.status === 429) return 'The server is busy';
    if (this.status === 503) return 'The server cannot take this now';
    if (this.status === 504) return 'The server took too long';
    if (this.status >= 500) return 'Something went wrong in the server';
    return 'The server did not accept this';
  }
}

export const apiKey = () => stored('sessionStorage', KEY) ?? stored('localStorage', KEY) ?? '';

export function setApiKey(key, keep) {
  store('sessionStorage', KEY, key || null);
  store('localStorage', KEY, keep && key ? key : null);
}

/** The JSON of a route, whatever its status is if `anyStatus` (readiness tells its body with 503 too). */
export async function getJson(path, { anyStatus = false } = {}) {
  const response = await ask(path, { cache: 'no-store' });
  if (!response.ok && !(anyStatus && response.status === 503)) throw await faultOf(response);
  return response.json();
}

/**
 * Ask for a chat completion and give its chunks as they come, each with the time when it was read.
 * Ends early with a Fault if the answer breaks off.
 */
export async function* streamChat(body, signal) {
  const response = await ask('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await faultOf(response);
  for await (const { data, readAt } of serverSentEvents(response.body, signal)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Fault(500, messageOf(chunk));
    yield { chunk, readAt };
  }
  throw new Fault(null, BROKEN_OFF);
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  try {
    return await fetch(path, { ...options, headers, credentials: 'same-origin' });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Fault(0, 'Check that the server runs and that you are connected to it, then try again.');
  }
}

async function faultOf(response) {
  let message = '';
  try {
    message = messageOf(await response.json());
  } catch {
    message = `The answer was ${response.status} ${response.statusText}, without an explanation.`;
  }
  const wait = Number(response.headers.get('retry-after'));
  return new Fault(response.status, message, wait > 0 ? wait : null);
}

function messageOf(body) {
  return String(body?.error?.message ?? 'The server gave no reason.');
}

async function* serverSentEvents(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const readAt = performance.now();
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith('data:')) data.push(line.slice(5).trimStart());
        else if (line === '' && data.length) {
          yield { data: data.join('\n'), readAt };
          data = [];
        }
      }
    }
  } catch (error) {
    throw signal?.aborted ? error : new Fault(null, BROKEN_OFF);
  } finally {
    reader.cancel().catch(() => {});
  }
}
