/* Drawing with SVG, and the tokens of both lanes over time. The rounds to scale: tokens/timeline.js. */

import { shape } from "../page/elements.js";

const MOST_POINTS = 500;

/** A step of 1, 2 or 5 times a power of ten that cuts `span` into at most `parts`. */
export function niceStep(span, parts) {
  const raw = span / parts || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= raw * 0.999);
}

export function decimals(step) {
  return Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
}

export function baseline(box) {
  return shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
}

/** Tokens over engine time, a line per lane, labelled at its end. */
export class Curve {
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
    ends.sort((a, b) => a.at - b.at || a.x - b.x);
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
