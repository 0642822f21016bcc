/* The race component: each event of the growing value (tokens/reader.js) is drawn once. */

import { copyText } from "../page/hand_over.js";
import { Card } from "./card.js";
import { Curve } from "./curve.js";
import { Inspector } from "./inspector.js";
import { Numbers, Tally } from "./numbers.js";
import { KEPT, Pane } from "./pane.js";
import { EventReader } from "./reader.js";
import { Replay } from "./replay.js";
import { Scrubber, connectTimeline } from "./scrubber.js";
import { Timeline } from "./timeline.js";
import { connectCard, connectHide } from "./walk.js";

class Race {
  constructor(root) {
    this.root = root;
    this.panes = {};
    for (const section of root.querySelectorAll(".pane")) this.panes[section.dataset.lane] = new Pane(section);
    this.status = root.querySelector(".status");
    this.announce = root.querySelector(".announce");
    this.numbers = new Numbers(root);
    this.curve = new Curve(root.querySelector('[data-chart="curve"] svg'));
    this.timeline = new Timeline(root.querySelector('[data-chart="timeline"]'));
    this.card = new Card(root.querySelector(".card"), "Click or press Enter for its whole round.");
    this.reader = new EventReader(this);
    this.documents = {};
    this.tallies = {};
    this.inspector = new Inspector(this);
    this.replay = new Replay(this);
    this.scrubber = new Scrubber(this);
    this.say("idle", "A race that is over is shown here.");
    const legend = [...root.querySelectorAll(".legend li")];
    const key = legend.map((item) => ({ kind: item.firstElementChild.dataset.kind, meaning: item.title }));
    this.panes.speculative.hint("Every token says what became of it:", key);
    this.panes.plain.hint("The same target, one token per pass, on the same clock.");
  }

  get busy() {
    return this.root.dataset.state === "busy";
  }

  set busy(busy) {
    if (busy) this.replay.leave();
    this.root.dataset.state = busy ? "busy" : "idle";
    this.scrubber.draw();
    this.root.dispatchEvent(new Event("busy"));
  }

  say(kind, text, why = "") {
    this.status.dataset.kind = kind;
    this.status.setAttribute("role", kind === "error" ? "alert" : "status");
    this.status.querySelector(".status-text").textContent = text;
    this.status.querySelector(".status-why").textContent = why;
  }

  update(value) {
    this.reader.update(value);
  }

  lost() {
    this.say("error", "Part of this run was lost on the way to the browser; please run it again.");
  }

  take(event) {
    if (event.e === "status") this.say(event.kind, event.text);
    else if (event.e === "open") this.open(event.lane, event.run);
    else if (event.e === "round") this.addRound(event);
    else if (event.e === "end") this.endLane(event.lane, event.run);
    else if (event.e === "verdict") this.verdict(event);
    else if (event.e === "error") this.say("error", event.text);
    else if (event.e === "done") this.done();
  }

  begin() {
    this.card.hide();
    this.busy = true;
    this.documents = {};
    this.tallies = {};
  }

  /** The lanes of a new run replace those of the last one only once there is something to show. */
  open(lane, run) {
    if (!Object.keys(this.documents).length) {
      this.inspector.close();
      Object.values(this.panes).forEach((pane) => pane.clear());
      this.numbers.clear();
      this.curve.clear();
      this.timeline.clear();
      this.panes.speculative.hint("Speculation is off.");
    }
    this.documents[lane] = { ...run, rounds: [] };
    this.tallies[lane] = new Tally(run);
    this.panes[lane].open(run);
  }

  addRound({ lane, round, prefill }) {
    const tally = this.tallies[lane];
    if (prefill !== undefined) {
      tally.prefill = prefill;
      this.say("running", "Racing: the lanes share the device, each on its own clock.");
    }
    if (lane === "plain") this.timeline.addStep(tally.elapsed, round);
    else this.timeline.addRound(tally.elapsed, round);
    tally.add(round);
    this.documents[lane].rounds.push(round);
    this.panes[lane].add(round);
    this.curve.add(lane, tally.elapsed, tally.tokens, tally.prefill);
  }

  endLane(lane, run) {
    Object.assign(this.documents[lane], run);
    this.tallies[lane].metrics = run.metrics;
    this.panes[lane].end(run);
  }

  verdict({ kind, text, why }) {
    this.say(kind, text, why ?? "");
    this.flush();
    this.announce.textContent = this.numbers.sentence();
  }

  done() {
    this.busy = false;
    this.inspector.refresh();
  }

  flush() {
    for (const lane of Object.keys(this.tallies)) this.panes[lane].flush();
    this.drawTallies(this.tallies);
    this.drawCharts();
  }

  drawTallies(tallies) {
    for (const [lane, tally] of Object.entries(tallies)) this.panes[lane].progress(tally.tokens, tally.rate);
    this.numbers.draw(tallies.speculative, tallies.plain);
  }

  drawCharts() {
    this.curve.draw();
    this.timeline.draw();
  }

  /** The output alone, as the run document has it. */
  text() {
    const lane = this.documents.speculative ? "speculative" : "plain";
    return this.documents[lane]?.text ?? this.panes[lane].text;
  }
}

/** A click or Enter on a token opens the inspector; while that is open it follows the focus, and needs no card. */
function connectInspector(race) {
  const { root, card, inspector } = race;
  const token = (event) => event.target.closest?.(".t");
  const inspect = (span) => {
    race.replay.pause();
    inspector.open(span);
    card.hide();
  };

  root.addEventListener("click", (event) => {
    if (token(event) && document.getSelection().isCollapsed) inspect(token(event));
  });
  root.addEventListener("focusin", (event) => {
    if (token(event) && inspector.span) inspect(token(event));
  });
  root.addEventListener("pointerover", (event) => {
    if (token(event) && token(event) === inspector.span) card.hide();
  });
  root.addEventListener("keydown", (event) => {
    if (!token(event) || !/^(Enter| )$/.test(event.key) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    inspect(token(event));
  });
}

function connectTools(race) {
  const copy = race.root.querySelector('[data-tool="copy"]');
  copy.addEventListener("click", async () => {
    await copyText(race.text());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy text"), 1200);
  });
  race.root.addEventListener("copy", (event) => {
    const text = selectedOutput(race);
    if (text === null) return;
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });
}

/** Escape closes what is open, the topmost first; who listens later sees that it was used. */
function connectEscape(race) {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || !race.root.offsetParent) return;
    if (race.card.span) race.card.hide();
    else if (race.inspector.span) race.inspector.close();
    else if (race.replay.active) race.scrubber.leave();
    else return;
    event.preventDefault();
  });
}

/** The kept tokens of a selection, as the model wrote them; null where it holds none. */
function selectedOutput(race) {
  const selection = document.getSelection();
  const chosen = [...race.root.querySelectorAll(".stream .t")].filter((span) => selection.containsNode(span, true));
  if (!chosen.length) return null;
  return chosen.filter((span) => KEPT.has(span.token.outcome)).map((span) => span.token.text).join("");
}

/** The race in its element; `page` is what Gradio gives the script of a component. Returns the race. */
export function mountRace(element, { props, watch }) {
  const race = new Race(element.querySelector(".race"));
  connectCard(race);
  connectHide(race.root);
  connectInspector(race);
  connectTimeline(race);
  connectTools(race);
  connectEscape(race);
  new ResizeObserver(() => race.drawCharts()).observe(race.root.querySelector(".charts"));
  race.root.race = race;
  watch("value", () => race.update(props.value));
  race.update(props.value);
  return race;
}
