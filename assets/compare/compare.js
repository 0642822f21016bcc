/* The comparison: up to four lanes side by side, drawn as the race draws its two, and the table of their figures. */

import { listen, make } from "../page/elements.js";
import { Runs } from "../page/runs.js";
import { LaneView, Lanes } from "../tokens/lanes.js";
import { connectAll, connectCard } from "../tokens/walk.js";
import { ServerLane } from "./server_lane.js";
import { Table } from "./table.js";

const MOST_LANES = 4;
const EMPTY =
  "Choose what each lane runs, then press Compare: lanes of the same target race at once, others are loaded in turn.";
const HINT = "Lane 1 writes here; every token says what became of it, as in the playground.";

class Comparison extends Lanes {
  constructor(root) {
    super(root, "comparison");
    this.ours = {};
    this.columns = root.querySelector(".lanes");
    for (let number = 1; number <= MOST_LANES; number += 1) this.addLane(number);
    this.whole = root.querySelector(".whole");
    this.steps = root.querySelector(".prompt-steps");
    this.table = new Table(root.querySelector(".table"));
    this.axis = root.querySelector(".chart figcaption span").textContent;
    this.clear();
    this.count = Number(root.dataset.count);
    this.say("idle", EMPTY);
    for (const [number, { pane }] of Object.entries(this.lanes)) {
      pane.hint(number === "1" ? HINT : "Lane " + number + " writes here.");
    }
  }

  addLane(number) {
    const section = this.root.querySelector("template").content.firstElementChild.cloneNode(true);
    section.dataset.lane = number;
    section.querySelector(".mark").textContent = this.root.dataset.marks[number - 1];
    section.querySelector(".stream").setAttribute(
      "aria-label", "Output of lane " + number + ". Arrow keys walk through the tokens.");
    this.columns.append(section);
    this.ours[number] = this.lanes[number] = new LaneView(section, "lane " + number, this.curve);
    this.name(number, "", "");
  }

  name(number, name, models) {
    const { section } = this.lanes[number].pane;
    section.querySelector("h2").textContent = number + " " + name;
    section.querySelector(".models").textContent = models;
    section.setAttribute("aria-label", "Lane " + number + [name, models].filter(Boolean).map((part) => ", " + part).join(""));
  }

  set count(count) {
    this.columns.style.setProperty("--count", count);
    for (const [number, { pane }] of Object.entries(this.lanes)) pane.section.hidden = number > count;
  }

  take(event) {
    if (event.e === "plan") this.plan(event);
    else if (event.e === "prompt") this.prompt(event);
    else if (event.e === "chunk") this.lanes[event.lane].add(event.chunk);
    else if (event.e === "name") this.name(event.lane, event.name, event.models);
    else if (event.e === "fail") this.fail(event);
    else if (event.e === "result") this.result(event);
    else super.take(event);
  }

  /** Runs by lane and by the number of their prompt; `at` is the one that is shown. */
  clear() {
    super.clear();
    this.runs = {};
    this.at = null;
    this.table.show([], "");
  }

  plan({ lanes, prompts, notes }) {
    this.clear();
    this.steps.hidden = true;
    this.prompts = prompts;
    this.count = lanes.length;
    for (const { lane, name, models, server } of lanes) {
      const { pane, label } = this.ours[lane];
      this.lanes[lane] = server ? new ServerLane(pane, label, this.curve) : this.ours[lane];
      this.name(lane, name, models);
    }
    const also = lanes.some(({ server }) => server) ? "; of a server, seconds since it was asked" : "";
    this.root.querySelector(".chart figcaption span").textContent = this.axis + also;
    this.say("starting", "Starting\u2026", notes.join(" "));
    this.fill(0, 1);
  }

  /** What the plan noted stays beside. */
  say(kind, text, why = null) {
    super.say(kind, text, why);
  }

  progress(event) {
    super.progress(event);
    if (event.of) this.fill(event.done, event.of);
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
    for (const [lane, runs] of Object.entries(this.runs)) {
      if (runs[at]) this.lanes[lane].show(runs[at], runs[at].prefill);
    }
    this.flush();
    this.steps.querySelector("span").textContent = "prompt " + (at + 1) + " of " + this.prompts.length + ", " + this.prompts[at];
  }

  open(lane, run) {
    super.open(lane, run);
    (this.runs[lane] ??= {})[this.at] = this.lanes[lane].run;
  }

  addRound(event) {
    const { run } = this.lanes[event.lane];
    if (event.prefill !== undefined) run.prefill = event.prefill;
    super.addRound(event);
  }

  /** A lane that had to give up says why in its own place; one that was only the baseline says it in the table. */
  fail({ lane, text }) {
    const pane = this.lanes[lane]?.pane;
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
    super.done();
    this.steps.hidden = !(this.prompts?.length > 1 && this.at !== null);
  }
}

/** What other parts of the tab ask: a measurement's document, and so many lanes. */
function connectRest(view) {
  listen(view.root, "click", (event) => {
    const number = event.target.closest?.("#many-readers [data-save]")?.dataset.save;
    if (number) document.dispatchEvent(new CustomEvent("take-away", { detail: { number: Number(number), form: "json" } }));
  });
  listen(view.root, "lane-count", (event) => view.busy || (view.count = event.detail));
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
  connectAll(view);
  new Runs(view, { name: "comparison", run: ["compare-run"], stop: "compare-stop", idle: EMPTY });
  connectRest(view);
  connectSteps(view);
  new ResizeObserver(() => view.drawCharts()).observe(view.root.querySelector(".chart"));
  view.root.view = view;
  watch("value", () => view.update(props.value));
  view.update(props.value);
}
