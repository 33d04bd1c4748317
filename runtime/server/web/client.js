// The requests to the server: models, health, and a streamed reply.

import {apiKey} from "./storage.js";

function headers() {
  const sent = {"content-type": "application/json"};
  if (apiKey()) sent.authorization = "Bearer " + apiKey();
  return sent;
}

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function refused(response) {
  let message = "HTTP " + response.status;
  try { message = (await response.json()).error.message; } catch { /* a proxy answered */ }
  return new RequestError(message, response.status);
}

export async function models() {
  const response = await fetch("v1/models", {headers: headers()});
  if (!response.ok) throw await refused(response);
  return (await response.json()).data;
}

export const health = async () => (await fetch("health")).json();

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new RequestError("The connection to the server ended during the reply.", 0);
    });
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const line of parts.flatMap((part) => part.split("\n"))) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function post(path, body, signal) {
  try {
    return await fetch(path, {method: "POST", headers: headers(), signal, body: JSON.stringify(body)});
  } catch (error) {
    throw error.name === "AbortError" ? error : new RequestError("The server cannot be reached.", 0);
  }
}

// Yields {text, reasoning, reason, usage} as they arrive; each may be absent.
export async function* streamReply(body, signal) {
  const sent = {...body, stream: true, stream_options: {include_usage: true}};
  const response = await post("v1/chat/completions", sent, signal);
  if (!response.ok) throw await refused(response);
  for await (const event of events(response)) {
    if (event.error) throw new RequestError(event.error.message, 0);
    const choice = event.choices[0];
    yield {text: choice?.delta.content, reasoning: choice?.delta.reasoning, reason: choice?.finish_reason, usage: event.usage};
  }
}
