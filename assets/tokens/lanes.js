/* Lanes at work: what a race and a comparison have in common. */

import { LineChart } from "../page/chart.js";
import { Card } from "./card.js";
import { Tally } from "./tally.js";
import { Pane } from "./pane.js";
import { EventReader } from "./reader.js";

/** One lane as it is shown: its run so far, the totals of it, its text, its line in the chart. */
export class LaneView {
  /** `label` names its line in `curve`. */
  constructor(section, label, curve) {
    this.pane = new Pane(section);
    this.label = label;
    this.curve = curve;
    this.clear();
  }

  clear() {
    this.run = null;
    this.tally = null;
    this.pane.clear();
  }

  open(run) {
    this.run = { ...run, rounds: [] };
    this.tally = new Tally(run);
    this.pane.open(run);
  }

  /** One more round; `prefill`, in seconds, comes with the first. Returns when it began, in engine time. */
  add(round, prefill) {
    if (prefill !== undefined) this.tally.prefill = prefill;
    const start = this.tally.elapsed;
    if (!this.tally.rounds) this.curve.add(this.label, start, 0);
    this.tally.add(round);
    this.run.rounds.push(round);
    this.pane.add(round);
    this.curve.add(this.label, this.tally.elapsed, this.tally.tokens);
    return start;
  }

  /** The run is over: `run` holds what was known at its end alone. */
  end(run) {
    Object.assign(this.run, run);
    this.tally.metrics = run.metrics;
    this.pane.end(run);
  }

  /** Draw a run again that was drawn before. */
  show(run, prefill) {
    this.open(run);
    run.rounds.forEach((round, i) => this.add(round, i ? undefined : prefill));
    if (run.metrics) this.end(run);
    this.run = run;
  }

  flush() {
    this.pane.flush();
    this.progress(this.tally);
  }

  progress(tally) {
    this.pane.progress(tally.tokens, tally.rate);
  }
}

/** Lanes by name, what is going on in words, and their curves; fed by the events of a growing value. */
export class Lanes {
  /** `what` is lost where part of it does not arrive; `hint`: see `Card`. */
  constructor(root, what, hint) {
    this.root = root;
    this.what = what;
    this.lanes = {};
    this.status = root.querySelector(".status");
    this.announce = root.querySelector(".announce");
    this.curve = new LineChart(root.querySelector('[data-chart="curve"] svg'), { unit: " s", least: [0.02, 8] });
    this.card = new Card(root.querySelector(".card"), hint);
    this.reader = new EventReader(this);
  }

  /** The lanes that show a run. */
  get shown() {
    return Object.values(this.lanes).filter((lane) => lane.run);
  }

  get busy() {
    return this.root.dataset.state === "busy";
  }

  set busy(busy) {
    this.root.dataset.state = busy ? "busy" : "idle";
    this.root.dispatchEvent(new Event("busy"));
  }

  /** What kind of thing was said last. */
  get kind() {
    return this.status.dataset.kind;
  }

  /** `why` null: what was said beside stays. */
  say(kind, text, why = "") {
    this.status.dataset.kind = kind;
    this.status.setAttribute("role", kind === "error" ? "alert" : "status");
    this.status.querySelector(".status-text").textContent = text;
    if (why !== null) this.status.querySelector(".status-why").textContent = why;
  }

  update(value) {
    this.reader.update(value);
  }

  lost() {
    this.say("error", "Part of this " + this.what + " was lost on the way to the browser; please run it again.");
  }

  begin() {
    this.card.hide();
    this.busy = true;
  }

  take(event) {
    if (event.e === "status") this.progress(event);
    else if (event.e === "open") this.open(event.lane, event.run);
    else if (event.e === "round") this.addRound(event);
    else if (event.e === "end") this.lanes[event.lane].end(event.run);
    else if (event.e === "error") this.say("error", event.text);
    else if (event.e === "done") this.done();
  }

  progress({ kind, text }) {
    this.say(kind, text);
  }

  clear() {
    for (const lane of Object.values(this.lanes)) lane.clear();
    this.curve.clear();
  }

  open(name, run) {
    this.lanes[name].open(run);
  }

  addRound({ lane, round, prefill }) {
    return this.lanes[lane].add(round, prefill);
  }

  done() {
    this.busy = false;
  }

  flush() {
    for (const lane of this.shown) lane.flush();
    this.drawCharts();
  }

  drawCharts() {
    this.curve.draw();
  }
}
