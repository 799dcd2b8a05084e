// SPDX-License-Identifier: Apache-2.0
// The page: a conversation on the left, what the engine does on the right.

import { Calls, readTools } from "/page/calls.js";
import { drawLanes, drawLine } from "/page/charts.js";
import { Picks } from "/page/picks.js";
import { events, getJson, postJson } from "/page/stream.js";

const $ = (id) => document.getElementById(id);
const ROOM = 120, LANES = 12, EVERY_MS = 400, PLACES = 4;

const state = {
  turns: [],          // what the model is told
  calls: null,        // calls of the last answer that wait for results
  key: sessionStorage.getItem("key") ?? "",
  running: null,      // AbortController of the answer under way
  number: 0,
  first: [], between: [], accepted: [], pages: [], rounds: [],
  device: "cpu", depth: 3, places: [], hover: null,
};

// ---- the conversation

function add(kind, text = "") {
  $("hint")?.remove();
  const turn = document.createElement("p");
  turn.className = `turn ${kind}`;
  turn.textContent = text;
  $("turns").append(turn);
  scroll();
  return turn;
}

function scroll() {
  const box = $("turns");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

// One event is one round: its accepted drafts come first, in the order they were drafted.
function addPieces(home, pieces) {
  let place = 0;
  for (const [text, accepted, token] of pieces ?? []) {
    if (accepted) place += 1;
    const span = document.createElement("span");
    span.textContent = text;
    span.dataset.place = token;
    if (accepted) span.className = `draft d${Math.min(place, PLACES)}`;
    home.append(span);
  }
  scroll();
}

function counts(usage, began, first) {
  const details = usage.completion_tokens_details;
  const drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
  const rate = (usage.completion_tokens - 1) / Math.max((performance.now() - first) / 1000, 1e-3);
  return `${usage.completion_tokens} tokens, ${details.accepted_prediction_tokens} of ${drafted} `
    + `drafts accepted; first after ${shortTime((first - began) / 1000)}, then ${rate.toFixed(0)} a second`;
}

function asked(text) {
  const common = {
    temperature: Number($("temperature").value), max_tokens: Number($("limit").value),
    stream: true, return_pieces: true, return_token_ids: true, stream_options: { include_usage: true },
  };
  if (text !== null && mode() === "continue") return ["/v1/completions", { ...common, prompt: text }];
  const thinking = $("thinking").checked;
  const tools = readTools($("tools").value);
  const offered = tools.length ? { tools, tool_choice: $("choice").value } : {};
  const messages = text === null ? state.turns : [...state.turns, { role: "user", content: text }];
  return ["/v1/chat/completions", { ...common, ...offered, messages, chat_template_kwargs: { thinking } }];
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

// Go on from `text`, or, where it is null, from results of calls.
async function answer(text) {
  const chat = text === null || mode() === "chat";
  const asking = request(text);
  if (!asking) return;
  const [path, body] = asking;
  if (chat && text !== null) add("user", text);
  const turn = add("model");
  const thought = turn.appendChild(document.createElement("span"));
  thought.className = "thought";
  if (!chat) {
    const given = turn.appendChild(document.createElement("span"));
    given.className = "given";
    given.textContent = text;
  }
  const began = performance.now();
  const calls = new Calls(turn);
  let first = 0, said = "", thoughts = "", finish = null;
  state.running = new AbortController();
  $("send").textContent = "Stop";
  try {
    for await (const chunk of events(path, body, state.key, state.running.signal)) {
      const choice = chunk.choices[0];
      picks.told(turn, chunk.prompt_token_ids ?? choice?.prompt_token_ids, choice?.token_ids);
      if (choice?.pieces) {
        first ||= performance.now();
        addPieces(thought, choice.reasoning_pieces);
        addPieces(turn, choice.pieces);
        calls.add(choice.delta?.tool_calls);
        finish = choice.finish_reason ?? finish;
        said += choice.text ?? choice.delta?.content ?? "";
        thoughts += choice.delta?.reasoning_content ?? "";
      }
      if (chunk.usage) {
        const line = turn.appendChild(document.createElement("span"));
        line.className = "counts quiet";
        line.textContent = counts(chunk.usage, began, first || began);
        scroll();
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      add("failed", error.message);
      if (error.status === 401) $("key").hidden = false;
    }
  } finally {
    state.running = null;
    $("send").textContent = "Send";
  }
  if (!chat || !(said || calls.list.length)) return;
  if (text !== null) state.turns.push({ role: "user", content: text });
  state.turns.push({
    role: "assistant", content: said,
    ...(thoughts && { reasoning_content: thoughts }),
    ...(calls.list.length && finish === "tool_calls" && { tool_calls: calls.said() }),
  });
  state.calls = finish === "tool_calls" ? calls : null;
  hint();
}

function request(text) {
  try {
    return asked(text);
  } catch (error) {
    add("failed", error.message);
    return null;
  }
}

// What the text field is for.
function hint() {
  const call = state.calls?.open;
  $("text").placeholder = call ? `What ${call.name} returned`
    : mode() === "chat" ? "What is the capital of France?" : "Emma was";
}

function submit(event) {
  event.preventDefault();
  if (state.running) return state.running.abort();
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  if (!state.calls?.open) return answer(text);
  state.turns.push(state.calls.answer(text));
  hint();
  if (!state.calls.open) answer(null);
}

// ---- what a token was chosen from

const picks = new Picks({
  figure: $("picks-figure"), canvas: $("picks"), now: $("picks-now"), note: $("picks-note"),
  ask: (prompt) => postJson("/debug/selection", { prompt, return_token_strs: true }, state.key),
  chosen: (span) => {
    for (const one of document.querySelectorAll(".chosen")) one.classList.remove("chosen");
    span.classList.add("chosen");
  },
});

$("turns").addEventListener("click", (event) => {
  const span = event.target.closest("[data-place]");
  if (span && !window.getSelection().toString()) picks.choose(span);
});

// ---- the engine

function shortTime(seconds) {
  if (!(seconds >= 0)) return "";
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

function keep(list, values, room = ROOM) {
  list.push(...values);
  list.splice(0, Math.max(list.length - room, 0));
}

function take(found) {
  state.number = found.number;
  state.device = found.device ?? state.device;
  state.depth = found.depth ?? state.depth;
  $("inside").hidden = state.device !== "cpu";
  keep(state.first, found.waits.filter((one) => one.kind === "first").map((one) => one.seconds));
  keep(state.between, found.waits.filter((one) => one.kind === "between").map((one) => one.seconds));
  const decoding = found.rounds.filter((one) => one.tokens && one.width <= 8);
  keep(state.accepted, decoding.map((one) => one.tokens / one.rows));
  keep(state.rounds, found.rounds, LANES);
  // Rounds far apart would be drawn as slivers: the picture is of the latest run of rounds.
  const gap = state.rounds.findLastIndex((one, i) => i && one.begun - state.rounds[i - 1].delivered > 0.25);
  if (gap > 0) state.rounds.splice(0, gap);
  const pools = found.load?.pages ?? [];
  if (pools.length) {
    const used = (pool) => (pool.total - pool.free - pool.cached) / pool.total;
    const fullest = pools.reduce((a, b) => (used(a) >= used(b) ? a : b));
    keep(state.pages, [used(fullest)]);
    $("pages-now").textContent = `${fullest.total - fullest.free - fullest.cached} of ${fullest.total}`;
  }
  const drafts = found.depth ? `${found.depth} drafts a round by ${found.drafter}` : "no drafts";
  $("about").textContent = found.device
    ? `${found.model} on ${found.device} (${found.graph}), ${drafts}` : `${found.model}: ${found.engine}`;
  $("state").className = `dot ${found.engine === "ready" ? "ready" : "down"}`;
  $("state").title = `engine: ${found.engine}`;
  $("wheel").classList.toggle("turning", (found.load?.running ?? 0) > 0);
}

function draw() {
  const ms = (value) => shortTime(value);
  drawLine($("first"), state.first, { show: ms, tone: "launch", room: 40 });
  drawLine($("between"), state.between, { show: ms, tone: "plan" });
  drawLine($("accepted"), state.accepted, { show: (value) => value.toFixed(0), tone: "accent", top: state.depth + 1 });
  const share = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
  drawLine($("pages"), state.pages, { show: share, tone: "device" });
  state.places = drawLanes($("lanes"), state.rounds, state.device);
  $("first-now").textContent = shortTime(state.first.at(-1));
  $("between-now").textContent = shortTime(mean(state.between.slice(-20)));
  $("accepted-now").textContent = state.accepted.length ? mean(state.accepted.slice(-20)).toFixed(2) : "";
  const last = state.hover ?? state.rounds.at(-1);
  $("lanes-now").textContent = last ? shortTime(last.arrived - last.begun) : "";
  $("round-note").textContent = last ? note(last) : "";
}

function note(round) {
  return `round ${round.round_id}: ${round.rows} of ${round.batch} rows, ${round.width} wide, `
    + `${round.depth} drafts next; ${round.tokens} tokens, ${round.accepted} of them drafts; `
    + `planned in ${shortTime(round.planned - round.begun)}, `
    + `delivered in ${shortTime(round.delivered - round.arrived)}`;
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

async function poll() {
  try {
    if (document.visibilityState === "visible") {
      take(await getJson(`/debug/rounds?after=${state.number}`, state.key));
      $("key").hidden = true;
      draw();
    }
  } catch (error) {
    $("state").className = "dot down";
    $("about").textContent = error.status === 401 ? "an API key is needed" : "the server does not answer";
    $("key").hidden = error.status !== 401;
  }
  setTimeout(poll, EVERY_MS);
}

$("ask").addEventListener("submit", submit);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
$("clear").addEventListener("click", () => {
  state.running?.abort();
  state.turns = [];
  state.calls = null;
  hint();
  picks.forget();
  $("turns").replaceChildren();
});
$("key").addEventListener("change", () => {
  state.key = $("key").value.trim();
  sessionStorage.setItem("key", state.key);
});
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => {
    $("think-setting").hidden = $("tool-setting").hidden = mode() !== "chat";
    hint();
  });
}
$("lanes").addEventListener("pointermove", (event) => {
  const hit = state.places.find((place) => event.offsetX >= place.from && event.offsetX <= place.to);
  state.hover = hit?.round ?? null;
  draw();
});
$("lanes").addEventListener("pointerleave", () => { state.hover = null; draw(); });
window.addEventListener("resize", () => { draw(); picks.draw(); });
poll();
