/* The two drawings under the panes, as SVG: tokens over time, and the rounds to scale. */

const SVG = "http://www.w3.org/2000/svg";
const MOST_POINTS = 500;
const ROUNDS_SHOWN = 32;
const NOTE = "draft (low), then the pass that checks it (high)";

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A step of 1, 2 or 5 times a power of ten that cuts `span` into at most `parts`. */
function niceStep(span, parts) {
  const raw = span / parts || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= raw * 0.999);
}

function decimals(step) {
  return Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
}

function baseline(box) {
  return shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
}

/** Tokens over engine time, a line per lane, labelled at its end. */
class Curve {
  constructor(svg) {
    this.svg = svg;
    this.clear();
  }

  clear() {
    this.lines = new Map();
    this.draw();
  }

  add(lane, elapsed, tokens, prefill) {
    let line = this.lines.get(lane);
    if (!line) this.lines.set(lane, (line = { points: [[prefill, 0]] }));
    line.points.push([elapsed, tokens]);
    if (line.points.length > MOST_POINTS) {
      const last = line.points.length - 1;
      line.points = line.points.filter((_, i) => i % 2 === 0 || i === last);
    }
  }

  draw() {
    const width = this.svg.clientWidth || 560;
    const height = this.svg.clientHeight || 130;
    const box = { left: 34, right: width - 78, top: 8, bottom: height - 18 };
    const ends = [...this.lines.values()].map((line) => line.points[line.points.length - 1]);
    if (!ends.length) return this.svg.replaceChildren(baseline(box));
    const time = Math.max(0.02, ...ends.map((end) => end[0])) * 1.02;
    const tokens = Math.max(8, ...ends.map((end) => end[1])) * 1.05;
    const x = (t) => box.left + (t / time) * (box.right - box.left);
    const y = (n) => box.bottom - (n / tokens) * (box.bottom - box.top);
    const made = [...this.axes(box, time, tokens, x, y)];
    for (const [lane, line] of this.lines) {
      const d = line.points.map(([t, n], i) => (i ? "L" : "M") + x(t).toFixed(1) + " " + y(n).toFixed(1)).join("");
      made.push(shape("path", { class: "curve-line", "data-lane": lane, d }));
    }
    made.push(...this.labels(x, y, box));
    this.svg.replaceChildren(...made);
  }

  *axes(box, time, tokens, x, y) {
    const timeStep = niceStep(time, 6);
    for (let i = 0; i * timeStep <= time; i += 1) {
      const at = x(i * timeStep);
      const text = (i * timeStep).toFixed(decimals(timeStep)) + (i ? "" : " s");
      yield shape("text", { class: "tick", x: at, y: box.bottom + 13, "text-anchor": "middle" }, text);
    }
    const tokenStep = niceStep(tokens, 4);
    for (let n = 0; n <= tokens; n += tokenStep) {
      yield shape("line", { class: n ? "grid" : "axis", x1: box.left, x2: box.right, y1: y(n), y2: y(n) });
      yield shape("text", { class: "tick", x: box.left - 6, y: y(n) + 3.5, "text-anchor": "end" }, String(n));
    }
  }

  /** Names at the line ends, pushed apart where they would touch. */
  *labels(x, y, box) {
    const ends = [...this.lines].map(([lane, line]) => {
      const [t, n] = line.points[line.points.length - 1];
      return { lane, x: x(t), y: y(n), at: Math.max(box.top + 4, y(n)) };
    });
    ends.sort((a, b) => a.at - b.at);
    for (let i = 1; i < ends.length; i += 1) {
      const near = Math.abs(ends[i].x - ends[i - 1].x) < 74;
      if (near && ends[i].at - ends[i - 1].at < 13) ends[i].at = ends[i - 1].at + 13;
    }
    for (const end of ends) {
      yield shape("circle", { class: "curve-end", "data-lane": end.lane, cx: end.x, cy: end.y, r: 3 });
      yield shape("text", { class: "curve-name", "data-lane": end.lane, x: end.x + 8, y: end.at + 4 }, end.lane);
    }
  }
}

/** The last rounds to scale: above, what each brought; below, its draft and its check beside plain steps. */
class Timeline {
  constructor(svg, note) {
    this.svg = svg;
    this.note = note;
    this.clear();
  }

  clear() {
    this.rounds = [];
    this.steps = [];
    this.count = 0;
    this.draw();
  }

  addRound(start, round) {
    this.count += 1;
    this.rounds.push({ start, end: start + seconds(round), round });
    if (this.rounds.length > ROUNDS_SHOWN) this.rounds.shift();
  }

  addStep(start, round) {
    this.steps.push([start, start + seconds(round)]);
  }

  draw() {
    const some = this.count > ROUNDS_SHOWN ? "; the last " + ROUNDS_SHOWN + " of " + this.count : "";
    this.note.textContent = NOTE + some;
    const width = this.svg.clientWidth || 560;
    const height = this.svg.clientHeight || 130;
    const box = { left: 74, right: width - 8, top: 4, bottom: height - 18 };
    if (!this.rounds.length && !this.steps.length) return this.svg.replaceChildren(baseline(box));
    const from = this.rounds[0]?.start ?? this.steps[0]?.[0] ?? 0;
    const to = Math.max(this.rounds.at(-1)?.end ?? this.lastStep(from), from + 0.001);
    const x = (t) => box.left + ((t - from) / (to - from)) * (box.right - box.left);
    const rows = { speculative: box.bottom - 46, plain: box.bottom - 20 };
    const paths = { draft: "", verify: "", plain: "" };
    const pips = {};
    for (const each of this.rounds) this.layOut(each, x, rows, paths, pips);
    for (const [start, end] of this.steps) {
      if (end > from && start < to) paths.plain += block(x(Math.max(start, from)), x(Math.min(end, to)), rows.plain, 18);
    }
    const made = Object.entries(paths).map(([kind, d]) => shape("path", { class: "block block-" + kind, d }));
    for (const [kind, d] of Object.entries(pips)) made.push(shape("path", { class: "pip", "data-kind": kind, d }));
    made.push(shape("text", { class: "tick", x: 0, y: rows.speculative + 13 }, "speculative"));
    made.push(shape("text", { class: "tick", x: 0, y: rows.plain + 13 }, "plain"));
    made.push(...this.scale(box, from, to, x));
    this.svg.replaceChildren(...made);
  }

  /** With no rounds, the window follows the plain steps. */
  lastStep(from) {
    if (this.steps.length > 4 * ROUNDS_SHOWN) this.steps.splice(0, this.steps.length - 4 * ROUNDS_SHOWN);
    return this.steps.at(-1)?.[1] ?? from;
  }

  layOut({ start, end, round }, x, rows, paths, pips) {
    const checked = start + round.draft_seconds;
    paths.draft += block(x(start), x(checked), rows.speculative + 10, 8);
    paths.verify += block(x(checked), x(end), rows.speculative, 18);
    const wide = x(end) - x(start);
    if (wide < 6) return;
    const size = Math.min(6, wide - 2);
    const tokens = round.emitted ? [...round.drafted, round.emitted] : round.drafted;
    const most = Math.floor((rows.speculative - 6) / (size + 1));
    tokens.slice(0, most).forEach((token, i) => {
      const bottom = rows.speculative - 5 - i * (size + 1);
      const left = x(start) + (wide - size) / 2;
      pips[token.outcome] = (pips[token.outcome] ?? "") + "M" + left.toFixed(1) + " " + bottom.toFixed(1) +
        "h" + size.toFixed(1) + "v" + -size.toFixed(1) + "h" + (-size).toFixed(1) + "z";
    });
  }

  *scale(box, from, to, x) {
    const step = niceStep(to - from, 5);
    yield shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    const unit = step < 0.5 ? [1000, " ms"] : [1, " s"];
    for (let i = Math.ceil(from / step); i * step <= to; i += 1) {
      const text = (i * step * unit[0]).toFixed(decimals(step * unit[0])) + unit[1];
      const at = x(i * step);
      if (at > box.right - 12) break;
      yield shape("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 3 });
      yield shape("text", { class: "tick", x: at, y: box.bottom + 13, "text-anchor": "middle" }, text);
    }
  }
}

/** A rectangle as path commands, with a hair of space after it. */
function block(left, right, top, height) {
  const width = Math.max(0.6, right - left - 1);
  return "M" + left.toFixed(1) + " " + top.toFixed(1) + "h" + width.toFixed(1) + "v" + height + "h" +
    (-width).toFixed(1) + "z";
}
