/* The inspector: the round of one token, what both models thought there, the test and what came of it. */

import { make, shape } from "../page/elements.js";
import { outcomeLine } from "./card.js";
import { fitTree, roundDrawing } from "./drawing.js";
import { shownOf } from "./pane.js";
import { seconds } from "./tally.js";
import { acceptance, isTree, laterSibling, lawsAt, residualOf, siblingsOf, testWords } from "./story.js";
import { figure, probability, quoted } from "./text.js";

export class Inspector {
  constructor(race) {
    this.race = race;
    this.box = race.root.querySelector(".inspector");
    this.title = this.box.querySelector(".inspector-title");
    this.body = this.box.querySelector(".inspector-body");
    this.span = null;
    const actions = {
      "round-back": () => this.stepRound(-1),
      "round-on": () => this.stepRound(1),
      "token-back": () => this.stepToken(-1),
      "token-on": () => this.stepToken(1),
      close: () => this.close(),
    };
    this.buttons = {};
    for (const button of this.box.querySelectorAll("[data-go]")) {
      this.buttons[button.dataset.go] = button;
      button.addEventListener("click", actions[button.dataset.go]);
    }
  }

  get lane() {
    return this.span.closest(".pane").dataset.lane;
  }

  get pane() {
    return this.race.lanes[this.lane].pane;
  }

  get rounds() {
    return this.race.lanes[this.lane].run.rounds;
  }

  /** Look at a token of a pane, and open where it is shut. `still`: scroll nothing. */
  open(chosen, still = false) {
    const span = chosen?.guess ?? chosen;
    if (!span || span === this.span) return;
    const focused = chosen === document.activeElement;
    this.unmark();
    this.span = span;
    this.race.card.hide();
    this.race.root.dataset.inspect = this.lane;
    this.box.hidden = false;
    this.pane.entry(span);
    this.marked = this.spansOf(span.round);
    this.fold = this.pane.folds.get(span.round);
    this.fold?.classList.add("inspected");
    this.marked.forEach((each) => each.classList.add("of-round"));
    span.classList.add("chosen");
    this.draw();
    if (focused && span !== chosen) span.focus({ preventScroll: true }); // its mark has just given way to it
    if (!still) this.bringIntoView(span);
    this.race.root.dispatchEvent(new Event("inspected"));
  }

  close() {
    if (!this.span) return;
    const { span, pane } = this;
    const inside = this.box.contains(document.activeElement);
    this.unmark();
    this.span = null;
    this.box.hidden = true;
    delete this.race.root.dataset.inspect;
    pane.enterShown();
    if (inside && span.isConnected) shownOf(span).focus({ preventScroll: true });
    this.race.root.dispatchEvent(new Event("inspected"));
  }

  unmark() {
    this.span?.classList.remove("chosen");
    this.fold?.classList.remove("inspected");
    this.marked?.forEach((each) => each.classList.remove("of-round"));
    this.marked = null;
  }

  spansOf(round) {
    return [...this.pane.tokens()].filter((span) => span.round === round);
  }

  /** Beside the text on a wide page, over its foot on a narrow one: there the token moves up out of its way. */
  bringIntoView(span) {
    span.scrollIntoView({ block: "nearest" });
    if (getComputedStyle(this.box).position !== "fixed") return;
    const below = span.getBoundingClientRect().bottom + 24 - this.box.getBoundingClientRect().top;
    if (below > 0) scrollBy(0, below);
  }

  stepToken(step) {
    const shown = [...this.pane.tokens()].filter((span) => !span.classList.contains("later"));
    this.open(shown[shown.indexOf(this.span) + step]);
  }

  stepRound(step) {
    this.openRound(this.lane, this.rounds[this.rounds.indexOf(this.span.round) + step]);
  }

  /** Look at the token of a round that says most: the refused one, else the last. */
  openRound(lane, round) {
    const spans = [...this.race.lanes[lane].pane.tokens()].filter((span) => span.round === round);
    const shown = spans.filter((span) => !span.classList.contains("later"));
    this.open(shown.find((span) => span.token.outcome === "rejected") ?? shown.at(-1));
  }

  /** Draw anew what a replay has changed. */
  refresh() {
    if (this.span) this.draw();
  }

  draw() {
    const { span, rounds } = this;
    const { token, round, position } = span;
    const tally = this.race.lanes[this.lane].tally;
    const at = rounds.indexOf(round);
    this.title.textContent = (this.lane === "plain" ? "Step " : "Round ") + (at + 1) + " of " + rounds.length;
    const moment = this.race.replay.momentOf(this.lane, round);
    this.enable(at, moment);
    const pick = (index) => this.open(this.spansOf(round).find((each) => each.position === index));
    const known = position < 0 ? moment.emitted : !moment.pending(position);
    const drawing = roundDrawing(round, moment, position, pick);
    const head = tokenHead(token, known);
    const laws = lawsDrawing(token, round, position, tally.greedy);
    const test = known ? testDrawing(token, round, position, tally.greedy) : [];
    const parts = isTree(round) ? [columns([drawing], [...head, ...laws, ...test])] : [drawing, ...head, columns(laws, test)];
    this.body.replaceChildren(make("p", "inspector-times", timesOf(round, this.plainStep())), ...parts);
    fitTree(drawing, drawing.clientWidth, Infinity);
  }

  enable(at, moment) {
    this.buttons["round-back"].disabled = at === 0;
    this.buttons["round-on"].disabled = !this.rounds[at + 1] || !moment.over || this.race.replay.isLater(this.lane, at + 1);
  }

  /** Mean seconds of a plain step, where plain decoding ran beside. */
  plainStep() {
    const plain = this.race.lanes.plain.tally;
    return plain?.rounds ? plain.seconds / plain.rounds : null;
  }
}

export function timesOf(round, step) {
  const milliseconds = (value) => (1000 * value).toFixed(1) + " ms";
  if (!round.drafted.length) return "Nothing drafted: one pass of the target in " + milliseconds(seconds(round)) + ".";
  const accepted = round.drafted.filter((token) => token.outcome === "accepted").length;
  const words = round.drafted.length + " drafted in " + milliseconds(round.draft_seconds) + ", checked in " +
    milliseconds(round.verify_seconds) + ", " + accepted + " accepted";
  return words + (step ? "; in all the time of " + (seconds(round) / step).toFixed(1) + " plain tokens." : ".");
}

/** What there is to show, side by side where there is room. */
function columns(...groups) {
  const box = make("div", "inspector-columns");
  for (const parts of groups) {
    if (!parts.length) continue;
    const column = make("div");
    column.append(...parts);
    box.append(column);
  }
  return box;
}

function tokenHead(token, known) {
  const head = make("div", "card-head inspector-token");
  head.append(make("code", "card-token", quoted(token.text)), make("span", "card-id", "id " + token.id));
  if (known) return [head, outcomeLine(token)];
  return [head, make("p", "card-outcome", "Proposed: the target has not judged it yet")];
}

/** p over q for every token that is known of here. */
function lawsDrawing(token, round, position, greedy) {
  const rows = lawsAt(token, round, position, greedy);
  if (!rows.length) return [];
  const heading = make("h4", "inspector-heading", "What both say here");
  const both = rows.some((row) => row.q);
  const key = make("span", "laws-key");
  key.append(keyMark("p"), "p target");
  if (both) key.append(keyMark("q"), "q draft");
  heading.append(key);
  if (!both) heading.firstChild.textContent = "What the target says here";
  const list = make("ol", "laws");
  for (const row of rows) list.append(lawRow(row, row.id === token.id));
  const parts = [heading, list];
  if (greedy) {
    parts.push(make("p", "inspector-note", "Probabilities at temperature 1. The run is greedy: only the likeliest counts."));
  }
  if (rows.some((row) => row.p.value == null || (row.q && row.q.value == null))) {
    const words = "\u2264: not among the " + recorded(token, round, position) + " likeliest tokens that are recorded of each " +
      "model, so it has at most as much as the last of them.";
    parts.push(make("p", "inspector-note", words));
  }
  return parts;
}

function recorded(token, round, position) {
  const siblings = siblingsOf(round, position);
  return Math.max(token.top_target?.length ?? 0, siblings[0]?.top_draft?.length ?? 0);
}

function keyMark(kind) {
  return make("i", "key-mark fill-" + kind);
}

function lawRow(row, chosen) {
  const item = make("li", chosen ? "law chosen" : "law");
  const name = make("code", "law-name", quoted(row.text));
  name.title = quoted(row.text);
  const bars = make("span", "law-bars");
  const figures = make("span", "law-figures");
  for (const kind of row.q ? ["p", "q"] : ["p"]) {
    const { value, most } = row[kind];
    const track = make("span", "card-track");
    const filled = make("i", "fill-" + kind + (value == null ? " bound" : ""));
    filled.style.width = 100 * Math.min(1, value ?? most) + "%";
    track.append(filled);
    bars.append(track);
    const words = make("span", "", figure({ value, most }));
    words.setAttribute("aria-label", kind + " " + words.textContent);
    figures.append(words);
  }
  item.append(name, bars, figures);
  return item;
}

/** How it was judged; for the target's own token, what it was drawn from. */
function testDrawing(token, round, position, greedy) {
  if (position < 0) return token.outcome === "corrected" ? residualDrawing(token, round, greedy) : [];
  if (token.outcome === "ignored") return [];
  /** @type {Element[]} */
  const parts = [make("h4", "inspector-heading", "The test"), make("p", "card-test", testWords(round, position, greedy))];
  if (!greedy && token.draw != null && !laterSibling(round, position)) parts.push(scale(acceptance(token), token.draw));
  return parts;
}

/** The number drawn on the way from 0 to 1: below the acceptance ratio the token stands. */
export function scale(ratio, draw) {
  const x = (value) => 8 + 284 * value;
  const svg = shape("svg", { class: "scale", viewBox: "0 0 300 44", role: "img" });
  svg.setAttribute("aria-label", "drew " + probability(draw) + ", accepted below " + probability(ratio));
  const end = (value) => (value < 0.25 ? "start" : value > 0.75 ? "end" : "middle");
  svg.append(
    shape("rect", { class: "scale-all", x: x(0), y: 16, width: 284, height: 10, rx: 2 }),
    shape("rect", { class: "scale-accept", x: x(0), y: 16, width: 284 * ratio, height: 10, rx: 2 }),
    shape("path", { class: "scale-ratio", d: "M" + x(ratio) + " 14v14" }),
    shape("path", { class: "scale-draw", d: "M" + x(draw) + " 15l-4.5 -7h9z" }),
    shape("text", { class: "tick", x: x(draw) + (end(draw) === "end" ? -8 : 8), y: 10, "text-anchor": end(draw) === "end" ? "end" : "start" },
      "drew " + probability(draw)),
    shape("text", { class: "tick", x: x(ratio), y: 41, "text-anchor": end(ratio) }, "min(1, p/q) = " + probability(ratio)),
  );
  if (ratio > 0.4) svg.append(shape("text", { class: "tick", x: x(0), y: 41 }, "0"));
  if (ratio < 0.6) svg.append(shape("text", { class: "tick", x: x(1), y: 41, "text-anchor": "end" }, "1"));
  return svg;
}

function residualDrawing(token, round, greedy) {
  const heading = make("h4", "inspector-heading", "What it was drawn from");
  if (greedy) return [heading, make("p", "card-test", "Nothing is drawn: it is the target\u2019s likeliest token here.")];
  const refused = siblingsOf(round, -1);
  if (refused.length > 1) {
    const words = refused.length + " tokens were refused here in turn, and each took its share: after every refusal p becomes " +
      "norm(max(0, p \u2212 q)), and q loses the refused token. It was drawn from what was left of p.";
    return [heading, make("p", "card-test", words)];
  }
  const rows = residualOf(lawsAt(token, round, -1, greedy));
  const list = make("ol", "laws");
  for (const row of rows) list.append(residualRow(row, row.id === token.id));
  heading.append(make("span", "laws-key", "norm(max(0, p \u2212 q))"));
  const words = "Shares among the tokens above only: those that are not recorded have some of it too, and a q that is not " +
    "recorded counts as 0.";
  return [heading, list, make("p", "inspector-note", words)];
}

function residualRow(row, chosen) {
  const item = make("li", chosen ? "law chosen" : "law");
  const bars = make("span", "law-bars");
  const track = make("span", "card-track");
  const filled = make("i", "fill-residual");
  filled.style.width = 100 * row.share + "%";
  track.append(filled);
  bars.append(track);
  item.append(make("code", "law-name", quoted(row.text)), bars, make("span", "law-figures", probability(row.share)));
  return item;
}
