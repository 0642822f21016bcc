/* Charts in SVG: a frame, scales, ticks, and lines that grow. */

import { shape } from "./elements.js";

const MOST_POINTS = 500;
const NAME_HEIGHT = 13;

/** A step of 1, 2 or 5 times a power of ten that cuts `span` into at most `parts`. */
export function niceStep(span, parts) {
  const raw = span / parts || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= raw * 0.999);
}

/** Digits after the point that tell multiples of `step` apart. */
export function decimals(step) {
  return Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
}

/** Round values from `from` to `to`, at most `parts` steps: {value, text}; `factor` turns a value into what is written. */
export function ticks(from, to, parts, factor = 1) {
  const step = niceStep(to - from, parts);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i += 1) {
    found.push({ value: i * step, text: (i * step * factor).toFixed(decimals(step * factor)) });
  }
  return found;
}

/** The straight map of [from, to] onto the pixels [start, end]. */
export function linear(from, to, start, end) {
  return (value) => start + ((value - from) / (to - from)) * (end - start);
}

/** The place for data in an SVG of `height` where it has no size yet: its edges in pixels, `margins` within it. */
export function frame(svg, margins, height) {
  const [width, high] = [svg.clientWidth || 560, svg.clientHeight || height];
  return { left: margins.left, right: width - margins.right, top: margins.top, bottom: high - margins.bottom };
}

export function level(kind, box, y) {
  return shape("line", { class: kind, x1: box.left, x2: box.right, y1: y, y2: y });
}

export function baseline(box) {
  return level("axis", box, box.bottom);
}

export function tickBelow(x, box, text) {
  return shape("text", { class: "tick", x, y: box.bottom + 13, "text-anchor": "middle" }, text);
}

/** Path commands through points of pixels. */
export function pathOf(points) {
  return points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
}

/** Every other point, the last one in any case: a line that grew too long at half the cost. */
export function thinned(points) {
  return points.filter((_, i) => i % 2 === 0 || i === points.length - 1);
}

/** Lines from 0 on both axes, each named at its end. */
export class LineChart {
  /** `unit` goes with the first tick below; the axes reach `least` = [x, y] at least. */
  constructor(svg, { unit, least }) {
    this.svg = svg;
    this.unit = unit;
    this.least = least;
    this.clear();
  }

  clear() {
    this.lines = new Map();
    this.draw();
  }

  /** One more point of the line `name`. */
  add(name, x, y) {
    const points = this.lines.get(name) ?? [];
    points.push([x, y]);
    this.lines.set(name, points.length > MOST_POINTS ? thinned(points) : points);
  }

  draw() {
    const box = frame(this.svg, { left: 34, right: 84, top: 8, bottom: 18 }, 130);
    const ends = [...this.lines.values()].map((points) => points.at(-1));
    if (!ends.length) return this.svg.replaceChildren(baseline(box));
    const most = this.least.map((least, i) => Math.max(least, ...ends.map((end) => end[i])));
    const [wide, high] = [most[0] * 1.02, most[1] * 1.05];
    const x = linear(0, wide, box.left, box.right);
    const y = linear(0, high, box.bottom, box.top);
    /** @type {SVGElement[]} */
    const made = [...this.axes(box, wide, high, x, y)];
    for (const [name, points] of this.lines) {
      const d = pathOf(points.map(([at, value]) => [x(at), y(value)]));
      made.push(shape("path", { class: "curve-line", "data-lane": name, d }));
    }
    made.push(...this.names(x, y, box));
    this.svg.replaceChildren(...made);
  }

  /** @returns {Iterable<SVGElement>} */
  *axes(box, wide, high, x, y) {
    for (const { value, text } of ticks(0, wide, 6)) yield tickBelow(x(value), box, text + (value ? "" : this.unit));
    for (const { value, text } of ticks(0, high, 4)) {
      yield level(value ? "grid" : "axis", box, y(value));
      yield shape("text", { class: "tick", x: box.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, text);
    }
  }

  /** @returns {Iterable<SVGElement>} */
  *names(x, y, box) {
    const ends = [...this.lines].map(([name, points]) => {
      const [at, value] = points.at(-1);
      return { name, x: x(at), y: y(value), at: Math.max(box.top + 4, y(value)) };
    });
    const right = Math.max(...ends.map((end) => end.x)); // beside no line, so each name has its line's colour before it
    for (const { name, x: left, y: height, at } of pushedApart(ends, box.bottom)) {
      yield shape("circle", { class: "curve-end", "data-lane": name, cx: left, cy: height, r: 3 });
      yield shape("rect", { class: "curve-end", "data-lane": name, x: right + 7, y: at - 1, width: 6, height: 3 });
      yield shape("text", { class: "curve-name", "data-lane": name, x: right + 17, y: at + 4 }, name);
    }
  }
}

/** Names of one column at heights `at`, from above, each moved down where it would touch the one before, and up again
 * where the last would stand below `bottom`. */
export function pushedApart(ends, bottom = Infinity) {
  const sorted = ends.map((end) => ({ ...end })).sort((a, b) => a.at - b.at || a.x - b.x);
  for (let i = 1; i < sorted.length; i += 1) sorted[i].at = Math.max(sorted[i].at, sorted[i - 1].at + NAME_HEIGHT);
  sorted.forEach((end, i) => (end.at = Math.min(end.at, bottom - (sorted.length - 1 - i) * NAME_HEIGHT)));
  return sorted;
}
