/* The comparison: up to four lanes side by side, drawn as the race draws its two, and the table of their figures. */

import { make } from "../page/elements.js";
import { Card } from "../tokens/card.js";
import { Curve } from "../tokens/curve.js";
import { Tally } from "../tokens/numbers.js";
import { Pane } from "../tokens/pane.js";
import { EventReader } from "../tokens/reader.js";
import { connectCard, connectHide } from "../tokens/walk.js";
import { Table } from "./table.js";

const MOST_LANES = 4;
const MARKS = ["\u25cf", "\u25c6", "\u25a0", "\u25b2"];
const EMPTY =
  "Choose what each lane runs, then press Compare: lanes of the same target race at once, others are loaded in turn.";

const HINT = "Lane 1 writes here; every token says what became of it, as in the playground.";

class Comparison {
  constructor(root) {
    this.root = root;
    this.lanes = root.querySelector(".lanes");
    this.panes = {};
    for (let number = 1; number <= MOST_LANES; number += 1) this.addPane(number);
    this.status = root.querySelector(".status");
    this.whole = root.querySelector(".whole");
    this.steps = root.querySelector(".prompt-steps");
    this.announce = root.querySelector(".announce");
    this.table = new Table(root.querySelector(".table"));
    this.curve = new Curve(root.querySelector('[data-chart="curve"] svg'));
    this.card = new Card(root.querySelector(".card"));
    this.reader = new EventReader(this);
    this.clear();
    this.count = Number(root.dataset.count);
    this.say("idle", EMPTY);
    for (const [number, pane] of Object.entries(this.panes)) pane.hint(number === "1" ? HINT : "Lane " + number + " writes here.");
  }

  addPane(number) {
    const section = this.root.querySelector("template").content.firstElementChild.cloneNode(true);
    section.dataset.lane = number;
    section.querySelector(".mark").textContent = MARKS[number - 1];
    section.querySelector(".stream").setAttribute(
      "aria-label", "Output of lane " + number + ". Arrow keys walk through the tokens.");
    this.lanes.append(section);
    this.panes[number] = new Pane(section);
    this.name(number, "", "");
  }

  name(number, name, models) {
    const section = this.panes[number].section;
    section.querySelector("h2").textContent = number + " " + name;
    section.querySelector(".models").textContent = models;
    section.setAttribute("aria-label", "Lane " + number + [name, models].filter(Boolean).map((part) => ", " + part).join(""));
  }

  set count(count) {
    this.lanes.style.setProperty("--count", count);
    for (const [number, pane] of Object.entries(this.panes)) pane.section.hidden = number > count;
  }

  get busy() {
    return this.root.dataset.state === "busy";
  }

  set busy(busy) {
    this.root.dataset.state = busy ? "busy" : "idle";
    document.documentElement.dataset.comparison = this.root.dataset.state;
  }

  say(kind, text, why) {
    this.status.dataset.kind = kind;
    this.status.setAttribute("role", kind === "error" ? "alert" : "status");
    this.status.querySelector(".status-text").textContent = text;
    if (why !== undefined) this.status.querySelector(".status-why").textContent = why;
  }

  lost() {
    this.say("error", "Part of this comparison was lost on the way to the browser; please run it again.");
  }

  begin() {
    this.card.hide();
    this.busy = true;
  }

  take(event) {
    if (event.e === "plan") this.plan(event);
    else if (event.e === "status") this.progress(event);
    else if (event.e === "prompt") this.prompt(event);
    else if (event.e === "open") this.open(event.lane, event.run);
    else if (event.e === "round") this.addRound(event);
    else if (event.e === "end") this.endLane(event.lane, event.run);
    else if (event.e === "fail") this.fail(event);
    else if (event.e === "result") this.result(event);
    else if (event.e === "error") this.say("error", event.text);
    else if (event.e === "done") this.done();
  }

  clear() {
    this.tallies = {};
    this.documents = {};
    for (const pane of Object.values(this.panes)) pane.clear();
    this.curve.clear();
    this.table.show([], "");
    this.at = null;
  }

  plan({ lanes, prompts, notes }) {
    this.clear();
    this.steps.hidden = true;
    this.prompts = prompts;
    this.count = lanes.length;
    for (const { lane, name, models } of lanes) this.name(lane, name, models);
    this.say("starting", "Starting\u2026", notes.join(" "));
    this.fill(0, 1);
  }

  progress({ kind, text, done, of }) {
    this.say(kind, text);
    if (of) this.fill(done, of);
  }

  /** How many runs are over, as a bar. */
  fill(done, of) {
    this.whole.firstElementChild.style.transform = "scaleX(" + done / of + ")";
    this.whole.setAttribute("aria-valuenow", done);
    this.whole.setAttribute("aria-valuemax", of);
  }

  /** Lanes that ran this prompt already, on another target, are shown on it too. */
  prompt({ at }) {
    if (this.at !== at) this.show(at);
  }

  show(at) {
    this.at = at;
    this.curve.clear();
    this.card.hide();
    for (const [lane, documents] of Object.entries(this.documents)) {
      const run = documents[at];
      if (!run) continue;
      this.openLane(lane, run);
      for (const round of run.rounds) this.drawRound(lane, round, run.prefill);
      this.closeLane(lane, run);
    }
    this.flush();
    this.steps.querySelector("span").textContent = "prompt " + (at + 1) + " of " + this.prompts.length + ", " + this.prompts[at];
  }

  open(lane, run) {
    (this.documents[lane] ??= {})[this.at] = { ...run, rounds: [] };
    this.openLane(lane, run);
  }

  openLane(lane, run) {
    this.tallies[lane] = new Tally(run);
    this.panes[lane].open(run);
  }

  addRound({ lane, round, prefill }) {
    const run = this.documents[lane][this.at];
    if (prefill !== undefined) run.prefill = prefill;
    run.rounds.push(round);
    this.drawRound(lane, round, run.prefill);
  }

  drawRound(lane, round, prefill) {
    const tally = this.tallies[lane];
    tally.prefill = prefill;
    tally.add(round);
    this.panes[lane].add(round);
    this.curve.add("lane " + lane, tally.elapsed, tally.tokens, tally.prefill);
  }

  endLane(lane, run) {
    this.closeLane(lane, Object.assign(this.documents[lane][this.at], run));
  }

  closeLane(lane, run) {
    if (!run.metrics) return;
    this.tallies[lane].metrics = run.metrics;
    this.panes[lane].end(run);
  }

  /** A lane that had to give up says why in its own place; one that was only the baseline says it in the table. */
  fail({ lane, text }) {
    const pane = this.panes[lane];
    if (!pane) return;
    pane.flush();
    pane.section.dataset.state = "failed";
    pane.note.textContent = "gave up";
    const error = make("p", "lane-error", text);
    error.setAttribute("role", "alert");
    pane.stream.append(error);
    pane.flush();
  }

  result({ kind, text, rows }) {
    this.flush();
    this.say(kind, text);
    this.announce.textContent = text;
    this.table.show(rows, this.caption(rows));
    if (kind === "finished") this.fill(1, 1);
  }

  caption(rows) {
    const most = Math.max(...rows.map((row) => row.prompts));
    if (this.prompts.length < 2) return "One prompt; the figures of another may differ.";
    return "Over " + most + " of " + this.prompts.length + " prompts; press a heading to sort.";
  }

  done() {
    this.busy = false;
    this.steps.hidden = !(this.prompts?.length > 1 && this.at !== null);
  }

  flush() {
    for (const [lane, tally] of Object.entries(this.tallies)) {
      this.panes[lane].flush();
      this.panes[lane].progress(tally.tokens, tally.rate);
    }
    this.curve.draw();
  }
}

/** Compare, Stop and their keys, while the tab is the one that is shown. */
function connectButtons(view) {
  const press = (selector) => document.querySelector(selector)?.click();
  let sent = 0;

  document.addEventListener("click", (event) => {
    if (event.target.closest?.("#compare-run")) onRun(event);
    else if (event.target.closest?.("#compare-stop") && view.busy) view.say("stopping", "Stopping\u2026");
  }, true);
  document.addEventListener("comparison-over", () => {
    sent = Math.max(0, sent - 1);
    if (sent > 0 || !view.busy) return;
    if (view.status.dataset.kind === "starting") view.say("idle", EMPTY, "");
    view.done();
  });
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || !view.root.checkVisibility()) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      press("#compare-run");
    } else if (event.key === "Escape") {
      if (view.card.span) view.card.hide();
      else if (view.busy) press("#compare-stop");
    }
  });
  document.addEventListener("lane-count", (event) => view.busy || (view.count = event.detail));

  function onRun(event) {
    if (!view.busy) {
      sent += 1;
      view.busy = true;
      view.say("starting", "Starting\u2026", "");
      return;
    }
    event.stopImmediatePropagation();
    event.preventDefault();
  }
}

/** After a set of prompts: which of them the lanes show. */
function connectSteps(view) {
  view.steps.addEventListener("click", (event) => {
    const step = Number(event.target.closest("button")?.dataset.step ?? 0);
    const count = view.prompts.length;
    if (step && !view.busy) view.show((view.at + step + count) % count);
  });
}

export function mount(element, { props, watch }) {
  const view = new Comparison(element.querySelector(".comparison"));
  connectCard(view);
  connectHide(view.root);
  connectButtons(view);
  connectSteps(view);
  new ResizeObserver(() => view.curve.draw()).observe(view.root.querySelector(".chart"));
  view.root.view = view;
  watch("value", () => view.reader.update(props.value));
  view.reader.update(props.value);
}
