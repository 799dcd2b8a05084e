// SPDX-License-Identifier: Apache-2.0
// What a token was chosen from: the earlier tokens that the indexers selected, layer by layer.

import { colour, prepared } from "/page/charts.js";

const LEFT = 50, TOP = 4, SUM = 16, GAP = 6, AXIS = 14;

// How many layers see each position: of every layer, and of all of them together.
export function seen(found) {
  const rows = found.layers.map(({ picks }) => {
    const row = new Uint8Array(found.position);
    for (const key of picks) {
      const stop = (key + 1) * found.ratio;
      row.fill(1, Math.max(0, stop - found.span), Math.min(stop, found.position));
    }
    return row;
  });
  const sum = new Uint16Array(found.position);
  for (const row of rows) row.forEach((one, at) => { sum[at] += one; });
  return { rows, sum };
}

// Shares of `values`, of at most `most` each, in as many stretches as there is room for.
function shares(values, most, room) {
  const count = Math.max(1, Math.min(values.length, Math.floor(room)));
  return Array.from({ length: count }, (_, i) => {
    const from = Math.floor((i * values.length) / count);
    const to = Math.max(from + 1, Math.floor(((i + 1) * values.length) / count));
    let total = 0;
    for (let at = from; at < to; at += 1) total += values[at];
    return total / ((to - from) * Math.max(most, 1));
  });
}

export class Picks {
  // `ask(ids)` fetches what is shown; `chosen(span)` marks the token, or none.
  constructor({ figure, canvas, now, note, ask, chosen }) {
    Object.assign(this, { figure, canvas, now, note, ask, chosen });
    this.found = this.seen = this.hover = this.span = this.x = null;
    this.turns = new WeakMap();
    this.asked = 0;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.step(event));
  }

  // An answer as it comes: `prompt` once, and the tokens of each round.
  told(turn, prompt, tokens) {
    const known = this.turns.get(turn) ?? { prompt: null, tokens: [] };
    if (prompt) known.prompt = prompt;
    known.tokens.push(...(tokens ?? []));
    this.turns.set(turn, known);
  }

  async choose(span) {
    const known = this.turns.get(span.closest(".turn"));
    if (!known?.prompt) return;
    const asked = (this.asked += 1), place = Number(span.dataset.place);
    this.span = span;
    this.chosen(span);
    this.figure.hidden = false;
    this.note.textContent = "asking";
    try {
      const found = await this.ask([...known.prompt, ...known.tokens.slice(0, place)]);
      if (asked !== this.asked) return;
      this.found = found;
      this.seen = seen(found);
    } catch (error) {
      if (asked !== this.asked) return;
      this.found = this.seen = null;
      this.note.textContent = error.message;
    }
    this.point(this.x);  // the mouse may rest there
    this.figure.scrollIntoView({ block: "nearest" });
  }

  forget() {
    this.asked += 1;
    this.found = this.seen = this.span = null;
    this.figure.hidden = true;
  }

  // The arrow keys go to the token before or behind.
  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !this.span) return;
    event.preventDefault();
    const spans = [...this.span.closest(".turn").querySelectorAll("[data-place]")];
    const next = spans[spans.indexOf(this.span) + way];
    if (next) this.choose(next);
  }

  point(x) {
    this.x = x;
    this.hover = null;
    if (this.found && x !== null && x >= LEFT) {
      const room = this.canvas.clientWidth - LEFT, count = this.found.position;
      this.hover = Math.min(Math.floor(((x - LEFT) / room) * count), count - 1);
    }
    this.draw();
  }

  draw() {
    if (this.figure.hidden) return;
    const { pen, width, height } = prepared(this.canvas);
    if (!this.found) return;
    const { layers, position } = this.found, room = width - LEFT;
    const below = height - AXIS - SUM, tall = (below - GAP - TOP) / Math.max(layers.length, 1);
    const strip = (values, most, y, high, tone) => {
      const parts = shares(values, most, room);
      pen.fillStyle = colour(tone);
      parts.forEach((share, i) => {
        if (!share) return;
        pen.globalAlpha = 0.15 + 0.85 * share;
        const from = LEFT + (i * room) / parts.length, to = LEFT + ((i + 1) * room) / parts.length;
        pen.fillRect(from, y, Math.max(to - from - (parts.length < room / 4 ? 0.6 : 0), 0.8), high);
      });
      pen.globalAlpha = 1;
    };
    this.seen.rows.forEach((row, i) => {
      strip(row, 1, TOP + i * tall, Math.max(tall - (tall > 4 ? 1 : 0), 1), "device");
    });
    strip(this.seen.sum, layers.length, below, SUM - 3, "accent");
    this.label(pen, below, tall, height, width);
    if (this.hover !== null) {
      pen.fillStyle = colour("ink");
      pen.fillRect(LEFT + ((this.hover + 0.5) * room) / position, TOP, 1, height - AXIS - TOP);
    }
    this.now.textContent = `position ${position}`;
    this.note.textContent = this.hover === null ? this.about() : this.one(this.hover);
  }

  label(pen, below, tall, height, width) {
    const { layers, position } = this.found;
    pen.fillStyle = colour("quiet");
    pen.textBaseline = "middle";
    const every = Math.ceil(12 / Math.max(tall, 0.1));
    layers.forEach(({ layer }, i) => {
      if (i % every === 0) pen.fillText(`layer ${layer}`, 3, TOP + (i + 0.5) * tall, LEFT - 6);
    });
    pen.fillText("all", 3, below + SUM / 2 - 1);
    pen.textBaseline = "alphabetic";
    pen.fillText("0", LEFT, height - 2);
    pen.textAlign = "right";
    pen.fillText(`${position - 1}`, width, height - 2);
    pen.textAlign = "left";
  }

  about() {
    const { layers, position, ratio, window } = this.found;
    if (!layers.length) return "no layer of this model has an indexer";
    const most = Math.max(...layers.map(({ picks }) => picks.length));
    const of = ratio === 1 ? `${position} earlier tokens` : `${Math.floor(position / ratio)} entries of ${ratio} tokens`;
    const besides = window ? `; besides, each sees the latest ${window}` : "";
    return `${layers.length} layers select up to ${most} of ${of} to choose this token${besides}`;
  }

  one(at) {
    const text = JSON.stringify(this.found.token_strs?.[at] ?? "");
    return `${text} at ${at}: selected in ${this.seen.sum[at]} of ${this.found.layers.length} layers`;
  }
}
