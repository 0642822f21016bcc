/* A head in training: what held-out answers show over time, what that promises here, and one answer drafted again. */

import { level, LineChart, pushedApart } from "../page/chart.js";
import { shape } from "../page/elements.js";
import { Runs } from "../page/runs.js";
import { Card } from "../tokens/card.js";
import { LaneView } from "../tokens/lanes.js";
import { EventReader } from "../tokens/reader.js";
import { connectAll, connectCard } from "../tokens/walk.js";

const WHOLE = 100;
const PLACES = ["1st", "2nd", "3rd", "4th", "5th"];
const LETTER = 6;
const WORTH = "worth using from here";
const EMPTY = "Press Start: the target writes texts, a head learns from them, and you see its guesses come true more and more.";

const ON_SAMPLES = "on sample prompts, as a race counts them";
const DOING = {
  writing: ({ writing }) => "The target is writing texts to learn from: " + count(writing) + " tokens so far.",
  reading: ({ texts }) => "The target reads texts, and the head learns what it saw in them: " + count(texts) + " texts so far.",
  learning: ({ loss }) => "The head is learning" + (loss == null ? "." : ": loss " + loss.toFixed(2) + "."),
  checking: () => "Checking the head on answers that it has never learnt from\u2026",
};

const percent = (share) => Math.round(100 * share) + " %";
const times = (ratio) => ratio.toFixed(2) + "\u00d7";
const count = (number) => number.toLocaleString("en");

/** 2:05, or 1:02:05. */
export function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? hours + ":" + String(minutes).padStart(2, "0") + ":" + rest : minutes + ":" + rest;
}

/** How often the tokens there are were learnt from. */
function coverage(seen, written, texts) {
  const words = count(written) + " in " + count(texts) + " texts";
  return seen > written ? words + ", each " + (seen / written).toFixed(1) + " times" : "of " + words;
}

/** Lines that may fall as well as rise, each with its value at its end; `mark` is a level they are read against. */
class Curves extends LineChart {
  constructor(svg, { least, text, mark = null }) {
    super(svg, { unit: " min", least });
    this.text = text;
    this.mark = mark;
    this.start = least;
  }

  clear() {
    this.least = this.start ?? this.least;
    super.clear();
  }

  add(name, x, y) {
    super.add(name, x, y);
    this.least = [this.least[0], Math.max(this.least[1], y)];
  }

  *axes(box, wide, high, x, y) {
    yield* super.axes(box, wide, high, x, y);
    if (!this.mark) return;
    yield level("worth", box, y(this.mark.at));
  }

  /** Where the mark's word stands from `left` on: on the side of its level that the lines leave free there. */
  clearOf(left, x, y) {
    const at = y(this.mark.at);
    const right = left + this.mark.word.length * LETTER;
    const near = [...this.lines.values()].flatMap((points) => points.flatMap(([place, value], i) => {
      const next = points[i + 1] ?? points[i];
      return x(place) <= right && x(next[0]) >= left ? [y(value), y(next[1])] : [];
    }));
    const taken = (from, to) => near.some((height) => height > from && height < to);
    return taken(at - 20, at) && !taken(at, at + 20) ? at + 14 : at - 5;
  }

  *names(x, y, box) {
    if (this.mark) {
      const left = box.left + 6;
      yield shape("text", { class: "worth-word", x: left, y: this.clearOf(left, x, y) }, this.mark.word);
    }
    const ends = [...this.lines].map(([name, points]) => {
      const [at, value] = points.at(-1);
      return { name, value, x: x(at), y: y(value), at: Math.max(box.top + 4, y(value)) };
    });
    for (const { name, value, x: left, y: height, at } of pushedApart(ends, box.bottom)) {
      yield shape("circle", { class: "curve-end", "data-lane": name, cx: left, cy: height, r: 3 });
      yield shape("text", { class: "curve-name", "data-lane": name, x: left + 8, y: at + 4 }, this.text(name, value));
    }
  }
}

/** An answer as one head drafted it: how much of it stood, in place of how fast it came. */
class Sample extends LaneView {
  constructor(section) {
    super(section, "", { add() {} });
  }

  draw({ run, seconds }) {
    const { stream } = this.pane;
    const at = stream.scrollTop;
    this.show(run, 0);
    this.flush();
    stream.scrollTop = at;
    const when = this.pane.section.dataset.lane === "now" ? ", after " + clock(seconds) : "";
    this.pane.note.textContent = percent(run.metrics.acceptance_rate ?? 0) + " of judged drafts accepted" + when;
  }

  flush() {
    this.pane.following = false;
    super.flush();
  }

  progress(tally) {
    this.pane.progress(tally.tokens, tally.tokensPerRound);
  }
}

class Training {
  constructor(root) {
    this.root = root;
    this.status = root.querySelector(".status");
    this.whole = root.querySelector(".whole");
    this.announce = root.querySelector(".announce");
    const svg = (name) => root.querySelector('[data-chart="' + name + '"] svg');
    this.acceptance = new Curves(svg("acceptance"), {
      least: [0.25, 40],
      text: (name, value) => name + " " + Math.round(value) + " %",
    });
    this.speed = new Curves(svg("speed"), {
      least: [0.25, 1.4],
      text: (name, value) => times(value),
      mark: { at: 1, word: WORTH },
    });
    this.lanes = Object.fromEntries(["before", "now"].map((name) => {
      return [name, new Sample(root.querySelector('.pane[data-lane="' + name + '"]'))];
    }));
    this.card = new Card(root.querySelector(".card"));
    this.reader = new EventReader(this);
    this.say("idle", EMPTY);
  }

  get busy() {
    return this.root.dataset.state === "busy";
  }

  set busy(busy) {
    this.root.dataset.state = busy ? "busy" : "idle";
    this.root.dispatchEvent(new Event("busy"));
  }

  get kind() {
    return this.status.dataset.kind;
  }

  done() {
    this.busy = false;
  }

  say(kind, text) {
    this.status.dataset.kind = kind;
    this.status.setAttribute("role", kind === "error" ? "alert" : "status");
    this.status.querySelector(".status-text").textContent = text;
  }

  figure(name, value, note) {
    const box = this.root.querySelector('[data-number="' + name + '"]');
    box.querySelector("b").textContent = value;
    if (note !== undefined) box.querySelector("small").textContent = note;
  }

  update(value) {
    this.reader.update(value);
  }

  lost() {
    this.say("error", "Part of this training was lost on the way to the browser; it goes on, and what follows is shown.");
  }

  begin() {
    this.card.hide();
    this.busy = true;
    this.clear();
  }

  clear() {
    this.acceptance.clear();
    this.speed.clear();
    for (const lane of Object.values(this.lanes)) lane.clear();
    for (const name of ["speed", "accepted", "seen", "left"]) this.figure(name, "\u2013");
    this.lanes.before.pane.hint("How the head drafts an answer before this training; soon here.");
    this.lanes.now.pane.hint("How it drafts the same answer now, anew from time to time.");
    this.figure("speed", "\u2013", "known after its first steps");
    delete this.root.dataset.won;
    this.fill(0);
  }

  fill(share) {
    this.whole.firstElementChild.style.transform = "scaleX(" + share + ")";
    this.whole.setAttribute("aria-valuenow", Math.round(WHOLE * share));
  }

  take(event) {
    if (event.e === "status") this.say(event.kind, event.text);
    else if (event.e === "standing") this.standing(event);
    else if (event.e === "look") this.look(event);
    else if (event.e === "outlook") this.outlook(event);
    else if (event.e === "sample") this.sample(event);
    else if (event.e === "over") this.over(event);
    else if (event.e === "error") this.say("error", event.text);
    else if (event.e === "done") this.done();
  }

  standing({ doing, seconds, left, share, writing, texts, written, seen, loss }) {
    this.root.removeAttribute("data-empty");
    this.figure("seen", count(seen), coverage(seen, written, texts));
    this.figure("left", left == null ? "\u2013" : clock(left), clock(seconds) + " so far");
    this.fill(share);
    const what = this.kind === "running" && DOING[doing];
    if (what) this.say("running", what({ writing, texts, loss }));
  }

  look({ seconds, agreement }) {
    agreement.forEach((share, i) => this.acceptance.add(PLACES[i], seconds / 60, 100 * share));
  }

  outlook({ seconds, accepted, between, speed_up: speedUp, length, before }) {
    const [rate, worth] = [times(speedUp), speedUp > 1];
    this.speed.add("speed", seconds / 60, speedUp);
    const range = between.map(percent).join(" to ");
    const where = range ? "on sample prompts, " + range + " on each" : ON_SAMPLES;
    this.figure("accepted", percent(accepted), before ? "before this training" : where);
    this.figure("speed", rate, worth ? "worth using, " + length + " drafted at a time" : "not worth using yet");
    this.root.dataset.won = worth;
  }

  sample(event) {
    this.card.hide();
    this.lanes[event.lane].draw(event);
  }

  over({ kind, text }) {
    this.say(kind, text);
    this.announce.textContent = text;
  }

  flush() {
    this.drawCharts();
  }

  drawCharts() {
    this.acceptance.draw();
    this.speed.draw();
  }
}

export function mount(element, { props, watch }) {
  const view = new Training(element.querySelector(".training"));
  connectCard(view);
  connectAll(view);
  new Runs(view, { name: "training", run: ["train-start", "train-resume"], stop: "train-stop", keys: false, idle: EMPTY });
  new ResizeObserver(() => view.drawCharts()).observe(view.root.querySelector(".chart"));
  view.root.view = view;
  watch("value", () => view.update(props.value));
  view.update(props.value);
}
