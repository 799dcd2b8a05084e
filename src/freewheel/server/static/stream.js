// SPDX-License-Identifier: Apache-2.0
// Server-sent events of a POST, one parsed value at a time.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Refused(response.status, body?.error?.message ?? `status ${response.status}`);
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export async function postJson(path, body, key) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function* events(path, body, key, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Refused(0, found.error.message);
      yield found;
    }
  }
}
