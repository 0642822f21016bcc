/* The race: the speculative lane and the plain one, each event of the growing value drawn once. */

import { listen } from "../page/elements.js";
import { copyText } from "../page/hand_over.js";
import { remember, remembered } from "../page/opened.js";
import { Inspector } from "./inspector.js";
import { LaneView, Lanes } from "./lanes.js";
import { Numbers, Repeats } from "./numbers.js";
import { KEPT } from "./pane.js";
import { Replay } from "./replay.js";
import { Scrubber, connectTimeline } from "./scrubber.js";
import { Timeline } from "./timeline.js";
import { connectAll, connectCard } from "./walk.js";

const RACING = "Racing, each lane on its own clock.";

export class Race extends Lanes {
  constructor(root) {
    super(root, "run", "Click or press Enter for its whole round.");
    this.more = root.querySelector(".status-more");
    for (const section of root.querySelectorAll(".pane")) {
      const name = section.dataset.lane;
      this.lanes[name] = new LaneView(section, name, this.curve);
    }
    this.numbers = new Numbers(root);
    this.timeline = new Timeline(root.querySelector('[data-chart="timeline"]'));
    this.inspector = new Inspector(this);
    this.replay = new Replay(this);
    this.scrubber = new Scrubber(this);
    this.root.addEventListener("busy", () => {
      if (this.busy) this.replay.leave();
      this.scrubber.draw();
    });
    this.asked = null;
    this.failed = false;
    this.prefix = "";
    this.repeats = new Repeats();
    this.lanes.speculative.pane.hint("The target\u2019s text, several tokens to a pass.");
    this.lanes.plain.pane.hint("The same target, one token to a pass.");
  }

  /** `more`: what a question behind the words opens. */
  say(kind, text, why = "", more = "") {
    super.say(kind, text, why);
    this.said = [kind, text, why, more];
    this.more.lastElementChild.textContent = more;
    this.more.hidden = !more;
    this.more.open = false;
  }

  /** The run documents that are shown, by lane. */
  get documents() {
    const shown = Object.entries(this.lanes).filter(([, lane]) => lane.run);
    return Object.fromEntries(shown.map(([name, lane]) => [name, lane.run]));
  }

  take(event) {
    if (event.e === "verdict") this.verdict(event);
    else if (event.e === "asked") this.incoming = event.controls;
    else if (event.e === "example") this.comes = event.where;
    else super.take(event);
  }

  /** `asked`: the controls that the run shown was started with, null where it came by another way; `example`: where it
   * was recorded, of one that the page came with; `failed`: whether a later one came to nothing. */
  begin() {
    super.begin();
    this.fresh = true;
    this.incoming = this.comes = null;
  }

  /** The lanes of a new run replace those of the last one only once there is something to show. */
  open(name, run) {
    if (this.fresh) {
      this.fresh = this.failed = false;
      this.asked = this.incoming;
      this.example = this.comes;
      this.inspector.close();
      this.clear();
      for (const lane of Object.values(this.lanes)) lane.pane.picture = Boolean(this.example);
      super.open(name, run);
      for (const tool of this.root.querySelectorAll("[data-tool]")) tool.disabled = false;
      this.root.dispatchEvent(new Event("shown"));
    } else super.open(name, run);
    this.root.toggleAttribute("data-alone", !this.documents.speculative);
  }

  clear() {
    super.clear();
    this.numbers.clear();
    this.timeline.clear();
  }

  addRound(event) {
    const first = this.shown.every((lane) => !lane.run.rounds.length);
    if (first) this.say("running", this.prefix + RACING);
    this.timeline.add(event.lane, super.addRound(event), event.round);
  }

  verdict({ kind, text, why, more, range }) {
    this.say(kind, text, why ?? "", more ?? "");
    const { speculative, plain } = this.documents;
    const whole = this.asked && speculative && plain && kind !== "stopped";
    this.numbers.settle(range, whole ? this.repeats.add(speculative, plain) : []);
    this.flush();
    this.announce.textContent = this.numbers.sentence();
  }

  done() {
    this.failed = this.fresh;
    super.done();
    this.inspector.refresh();
  }

  flush() {
    super.flush();
    this.numbers.draw(this.lanes.speculative.tally, this.lanes.plain.tally);
  }

  /** Show totals of another moment, by lane. */
  drawTallies(tallies) {
    for (const [name, tally] of Object.entries(tallies)) this.lanes[name].progress(tally);
    this.numbers.draw(tallies.speculative, tallies.plain);
  }

  /** The example plays by itself, until somebody takes over. */
  playExample() {
    if (this.example && !this.busy && !this.replay.active) this.replay.playThrough();
  }

  stopExample() {
    if (this.replay.through) this.replay.leave();
  }

  drawCharts() {
    super.drawCharts();
    this.timeline.draw();
  }

  /** The output alone, as the run document has it. */
  text() {
    const { speculative, plain } = this.lanes;
    const lane = speculative.run ? speculative : plain;
    return lane.run?.text ?? lane.pane.text;
  }
}

/** A click or Enter on a token opens the inspector; while that is open it follows the focus, and needs no card. */
function connectInspector(race) {
  const { root, card, inspector } = race;
  const token = (event) => event.target.closest?.(".t");
  const inspect = (span) => {
    race.stopExample();
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

/** What stands under the panes: opened, and remembered, by who wants more than the one number. */
function connectMore(race) {
  const more = race.root.querySelector('[data-tool="more"]');
  const open = (on) => {
    race.root.toggleAttribute("data-more", on);
    more.setAttribute("aria-expanded", String(on));
    race.drawCharts();
  };
  more.addEventListener("click", () => {
    const on = !race.root.hasAttribute("data-more");
    open(on);
    remember("more", on);
  });
  open(remembered("more"));
}

/** Escape closes what is open, the topmost first; who listens later sees that it was used. */
function connectEscape(race) {
  listen(race.root, "keydown", (event) => {
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
  connectAll(race);
  connectMore(race);
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
