/* Rounds to scale: above, what each brought; below, its draft and its check beside plain steps. A round can be chosen. */

import { baseline, frame, linear, niceStep, tickBelow, ticks } from "../page/chart.js";
import { shape } from "../page/elements.js";
import { seconds } from "./tally.js";

const ROUNDS_SHOWN = 32;
const NOTE = "draft (low), then the pass that checks it (high)";

export class Timeline {
  /** `figure` holds the drawing, its note and the slider that makes it usable by keyboard. */
  constructor(figure) {
    this.svg = figure.querySelector("svg");
    this.note = figure.querySelector(".timeline-note");
    this.slider = figure.querySelector(".timeline");
    this.clear();
  }

  clear() {
    this.rounds = [];
    this.steps = [];
    this.chosen = null;
    this.first = 0;
    this.draw();
  }

  add(lane, start, round) {
    const end = start + seconds(round);
    if (lane === "plain") this.steps.push([start, end]);
    else this.rounds.push({ start, end, round });
  }

  /** Mark a round by its number from 0, and show the rounds around it; null: none, and the last ones are shown. */
  choose(index) {
    if (index === this.chosen) return;
    this.chosen = index;
    this.draw();
  }

  /** The number of the round at a place on the screen, or null where there is none. */
  roundAt(clientX) {
    if (!this.range || !this.rounds.length) return null;
    const { left, right, from, to } = this.range;
    const time = from + ((clientX - this.svg.getBoundingClientRect().left - left) / (right - left)) * (to - from);
    const found = this.rounds.findIndex((each) => time < each.end);
    return found >= 0 ? found : this.rounds.length - 1;
  }

  /** Which rounds are shown: the last ones, or where one is chosen the window that holds it, moved no more than needed. */
  window() {
    const last = Math.max(0, this.rounds.length - ROUNDS_SHOWN);
    if (this.chosen === null) this.first = last;
    else if (this.chosen < this.first) this.first = this.chosen;
    else if (this.chosen >= this.first + ROUNDS_SHOWN) this.first = Math.min(last, this.chosen - ROUNDS_SHOWN + 1);
    return this.rounds.slice(this.first, this.first + ROUNDS_SHOWN);
  }

  draw() {
    const shown = this.window();
    this.describe(shown);
    const box = frame(this.svg, { left: 74, right: 8, top: 4, bottom: 18 }, 98);
    this.range = null;
    if (!shown.length && !this.steps.length) return this.svg.replaceChildren(baseline(box));
    const from = shown[0]?.start ?? this.firstStep();
    const to = Math.max(shown.at(-1)?.end ?? this.steps.at(-1)[1], from + 0.001);
    this.range = { ...box, from, to };
    const x = linear(from, to, box.left, box.right);
    const rows = { speculative: box.bottom - 42, plain: box.bottom - 19 };
    const paths = { draft: "", verify: "", plain: "" };
    const pips = {};
    const made = [];
    const chosen = this.rounds[this.chosen];
    if (chosen) made.push(this.mark(x(chosen.start), x(chosen.end), box));
    for (const each of shown) this.layOut(each, x, rows, paths, pips);
    for (const [start, end] of this.stepsBetween(from, to)) {
      paths.plain += block(x(Math.max(start, from)), x(Math.min(end, to)), rows.plain, 16);
    }
    for (const [kind, d] of Object.entries(paths)) made.push(shape("path", { class: "block block-" + kind, d }));
    for (const [kind, d] of Object.entries(pips)) made.push(shape("path", { class: "pip", "data-kind": kind, d }));
    made.push(shape("text", { class: "tick", x: 0, y: rows.speculative + 13 }, "speculative"));
    made.push(shape("text", { class: "tick", x: 0, y: rows.plain + 12 }, "plain"));
    made.push(...this.scale(box, from, to, x));
    this.svg.replaceChildren(...made);
  }

  describe(shown) {
    const count = this.rounds.length;
    const part = this.first + shown.length < count ? "; " + (this.first + 1) + " to " + (this.first + shown.length) : "; the last " + shown.length;
    this.say(NOTE + (count > ROUNDS_SHOWN ? part + " of " + count : ""));
    const at = this.chosen ?? count - 1;
    this.slider.tabIndex = count ? 0 : -1;
    this.slider.setAttribute("aria-valuemin", count ? 1 : 0);
    this.slider.setAttribute("aria-valuemax", count);
    this.slider.setAttribute("aria-valuenow", at + 1);
    this.slider.setAttribute("aria-valuetext", count ? "round " + (at + 1) + " of " + count : "no rounds yet");
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  mark(left, right, box) {
    const width = Math.max(4, right - left);
    return shape("rect", { class: "timeline-mark", x: left - 1, y: 0, width: width + 1, height: box.bottom, rx: 2 });
  }

  /** With no rounds, the window follows the plain steps. */
  firstStep() {
    return this.steps.at(-Math.min(this.steps.length, 4 * ROUNDS_SHOWN))[0];
  }

  /** The plain steps within a span of time: found by bisection, so that a long run costs no more than a short one. */
  stepsBetween(from, to) {
    return this.steps.slice(this.firstAfter(from), this.firstAfter(to) + 1).filter(([start, end]) => end > from && start < to);
  }

  firstAfter(time) {
    let low = 0;
    let high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle][1] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  layOut({ start, end, round }, x, rows, paths, pips) {
    const checked = start + round.draft_seconds;
    paths.draft += block(x(start), x(checked), rows.speculative + 9, 7);
    paths.verify += block(x(checked), x(end), rows.speculative, 16);
    const wide = x(end) - x(start);
    if (wide < 6) return;
    const tokens = round.emitted ? [...round.drafted, round.emitted] : round.drafted;
    const step = Math.min(7, (rows.speculative - 4) / tokens.length);
    const height = Math.max(1, step - 1);
    const size = Math.min(6, wide - 2);
    const left = x(start) + (wide - size) / 2;
    tokens.forEach((token, i) => {
      const bottom = rows.speculative - 3 - i * step;
      pips[token.outcome] = (pips[token.outcome] ?? "") + "M" + left.toFixed(1) + " " + bottom.toFixed(1) +
        "h" + size.toFixed(1) + "v" + (-height).toFixed(1) + "h" + (-size).toFixed(1) + "z";
    });
  }

  *scale(box, from, to, x) {
    yield baseline(box);
    const [factor, unit] = niceStep(to - from, 5) < 0.5 ? [1000, " ms"] : [1, " s"];
    for (const { value, text } of ticks(from, to, 5, factor)) {
      const at = x(value);
      if (at > box.right - 12) break;
      yield shape("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 3 });
      yield tickBelow(at, box, text + unit);
    }
  }
}

/** A rectangle as path commands, with a hair of space after it. */
function block(left, right, top, height) {
  const width = Math.max(0.6, right - left - 1);
  return "M" + left.toFixed(1) + " " + top.toFixed(1) + "h" + width.toFixed(1) + "v" + height + "h" +
    (-width).toFixed(1) + "z";
}
