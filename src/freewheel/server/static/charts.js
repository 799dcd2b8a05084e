// SPDX-License-Identifier: Apache-2.0
// Two pictures on a canvas: the last values of something, and the lanes of the last rounds.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

function niceTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= most * 0.999);
}

// values: numbers, oldest first; a line with its area, over a few ruled heights.
export function drawLine(canvas, values, { show, tone = "accent", top = null, room = 120 }) {
  const { pen, width, height } = prepared(canvas);
  const most = top ?? niceTop(Math.max(...values, 0));
  const left = 2, low = height - 4, high = 14;
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("quiet");
  pen.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(low - share * (low - high)) + 0.5;
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(width, y);
    pen.stroke();
  }
  pen.fillText(show(most), left, high - 4);
  if (!values.length) return;
  const step = (width - left) / Math.max(room - 1, 1);
  const from = width - (values.length - 1) * step;
  const at = (value) => low - Math.min(value / most, 1) * (low - high);
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(from + i * step, at(value)));
  pen.strokeStyle = colour(tone);
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, low);
  pen.lineTo(from, low);
  pen.globalAlpha = 0.12;
  pen.fillStyle = colour(tone);
  pen.fill();
  pen.globalAlpha = 1;
  pen.beginPath();
  pen.arc(width - 2, at(values.at(-1)), 2.2, 0, 7);
  pen.fill();
}

// When the device worked on a round, as far as the host can tell: on a CPU inside the launch; on
// a GPU from the launch, once the round before has ended, until the letter is here.
function deviceSpan(round, device, free) {
  if (device === "cpu") return [round.planned, round.launched];
  return [Math.max(round.launched, free), Math.max(round.arrived, free)];
}

// rounds: oldest first. Returns the places of the rounds, for the pointer.
export function drawLanes(canvas, rounds, device) {
  const { pen, width, height } = prepared(canvas);
  const left = 46, lane = 34, host = 10, dev = host + lane + 16, axis = dev + lane + 8;
  pen.fillStyle = colour("quiet");
  pen.textBaseline = "middle";
  pen.fillText("host", 0, host + lane / 2);
  pen.fillText("device", 0, dev + lane / 2);
  if (!rounds.length) {
    pen.fillText("no round yet", left, axis);
    pen.textBaseline = "alphabetic";
    return [];
  }
  const start = rounds[0].begun, end = Math.max(...rounds.map((one) => one.delivered));
  const x = (time) => left + ((time - start) / (end - start)) * (width - left - 2);
  const bar = (from, to, y, tone, tall = lane) => {
    pen.fillStyle = colour(tone);
    pen.fillRect(x(from), y, Math.max(x(to) - x(from), 0.8), tall);
  };
  let free = 0;
  const places = rounds.map((round) => {
    bar(round.begun, round.planned, host, "plan");
    bar(round.planned, round.launched, host, "launch");
    bar(round.asked, round.arrived, host, "wait");
    bar(round.arrived, round.delivered, host, "deliver");
    const [from, to] = deviceSpan(round, device, free);
    free = to;
    bar(from, to, dev, "device");
    pen.fillStyle = colour("card");
    pen.fillRect(x(to) - 0.6, dev, 1.2, lane);
    const label = `${round.tokens}`;
    if (x(to) - x(from) > pen.measureText(label).width + 6) {
      pen.textAlign = "center";
      pen.fillText(label, (x(from) + x(to)) / 2, dev + lane / 2);
      pen.textAlign = "left";
    }
    return { round, from: x(from), to: x(to) };
  });
  const span = (end - start) * 1000, step = niceTop(span / 5);
  pen.fillStyle = colour("quiet");
  pen.textAlign = "center";
  for (let ms = 0; ms <= span; ms += step) {
    pen.fillRect(x(start + ms / 1000), axis - 5, 1, 4);
    if (ms < span * 0.95) pen.fillText(ms ? `${+ms.toFixed(2)} ms` : "0", x(start + ms / 1000), axis + 6);
  }
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  return places;
}
