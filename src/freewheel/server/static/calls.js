// SPDX-License-Identifier: Apache-2.0
// Calls of tools: what an answer asks for, and the results that somebody gives.

// Calls of one answer, as their deltas come; each has a block of its own below the text.
export class Calls {
  constructor(home) {
    this.home = home;
    this.list = [];
  }

  add(deltas) {
    for (const delta of deltas ?? []) {
      if (delta.id) this.list[delta.index] = this.begun(delta);
      const call = this.list[delta.index];
      call.arguments += delta.function.arguments ?? "";
      call.shown.textContent = call.arguments;
    }
  }

  begun(delta) {
    const block = document.createElement("details");
    block.className = "call";
    block.open = true;
    const head = block.appendChild(document.createElement("summary"));
    head.textContent = delta.function.name;
    const shown = block.appendChild(document.createElement("code"));
    this.home.append(block);
    return { id: delta.id, name: delta.function.name, arguments: "", shown, block };
  }

  // The calls as a turn of the conversation has them.
  said() {
    return this.list.map(({ id, name, arguments: text }) => (
      { id, type: "function", function: { name, arguments: text } }
    ));
  }

  // The first call that nobody has answered, or undefined.
  get open() {
    return this.list.find((call) => call.result === undefined);
  }

  answer(text) {
    const call = this.open;
    call.result = text;
    const shown = call.block.appendChild(document.createElement("samp"));
    shown.textContent = text;
    return { role: "tool", tool_call_id: call.id, content: text };
  }
}

// The tools of the text field: a list, or one, of functions or of OpenAI's wrapped ones.
export function readTools(text) {
  if (!text.trim()) return [];
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`tools: not JSON: ${error.message}`);
  }
  return (Array.isArray(found) ? found : [found]).map((one) => (
    one?.type === "function" ? one : { type: "function", function: one }
  ));
}
