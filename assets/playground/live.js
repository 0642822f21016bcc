/* What only the race of this page's own buttons has: Run, Run ×5, Watch slowly, Stop, what was asked for during a run,
   and before the first run the example that plays. */

import { listen, make } from "../page/elements.js";
import { connectNewcomer } from "../page/setup.js";
import { Runs } from "../page/runs.js";
import { mountRace } from "../tokens/race.js";
import { connectStanding } from "./standing.js";
import { connectTour } from "./tour.js";

const REPEATS = 5;
const NARROW = 820;

/** Races of several runs, one after the other. */
class Races extends Runs {
  constructor(race) {
    super(race, { name: "race", run: ["run"], stop: "stop" });
    this.asked = this.left = 0;
    this.watching = this.held = false;
    this.reading = location.search !== "";
    const five = make("button", "tool", "Run \u00d75");
    Object.assign(five, { type: "button", id: "run-five", title: "Five runs of the same: how far the speed-up spreads" });
    race.root.querySelector(".tools").prepend(five);
    race.root.addEventListener("busy", () => race.busy || this.next());
    listen(race.root, "run-with", ({ detail }) => this.runWith(detail));
    listen(race.root, "settings-changed", ({ detail }) => this.settled(detail));
    listen(race.root, "address-read", () => this.read());
    for (const touch of /** @type {const} */ (["pointerdown", "keydown"])) listen(race.root, touch, () => (this.wanted = null), true);
  }

  click(event) {
    const pressed = event.target.closest?.("button")?.id;
    if (pressed === "run" && this.reading && !this.view.busy) return this.hold(event);
    super.click(event);
    if (pressed === "run-five") this.ask(REPEATS);
    else if (pressed === "watch") this.watch();
  }

  /** A run waits for the controls to be as the address asks. */
  hold(event) {
    event.stopImmediatePropagation();
    event.preventDefault();
    if (!this.left) this.asked = this.left = 1;
    this.held = this.view.busy = true;
    this.view.say("starting", "Starting\u2026");
  }

  read() {
    this.reading = false;
    if (!this.held) return;
    this.held = false;
    if (!this.left) this.view.say("idle", "Stopped.");
    this.view.busy = false;
  }

  /** What was asked for while a run was on. */
  next() {
    if (this.view.failed) {
      this.left = 0;
      this.watching = false;
    }
    if (this.left) setTimeout(() => this.press(), 0);
    else if (this.watching) setTimeout(() => this.watch(), 0);
  }

  /** So many runs one after the other, after the one that is on. */
  ask(times) {
    this.asked = this.left = times;
    if (!this.view.busy) return this.press();
    const which = times > 1 ? "your runs start" : "your next run starts";
    this.view.say("queued", "Queued: " + which + " when this one ends. Stop cancels all.");
  }

  refused() {
    this.ask(1);
  }

  started() {
    if (!this.left) this.asked = this.left = 1;
    this.left -= 1;
    const { view, asked, left } = this;
    super.started();
    view.prefix = asked > 1 ? "Run " + (asked - left) + " of " + asked + ". " : "";
    if (innerWidth <= NARROW) view.root.scrollIntoView({ block: "start" });
    view.say("starting", view.prefix + "Starting\u2026");
  }

  /** The run shown, slowly; where it is none of this prompt and of what is chosen, once there is one. */
  watch() {
    const { view } = this;
    /** @type {HTMLTextAreaElement | null} */
    const box = document.querySelector("#prompt textarea");
    const same = view.shown[0]?.run.prompt === box?.value;
    this.watching = view.busy || !view.replay.length || !same || view.root.hasAttribute("data-past");
    if (!this.watching) view.scrubber.watch();
    else if (!view.busy) this.press();
  }

  stopped() {
    this.left = 0;
    this.watching = false;
    super.stopped();
  }

  /** Run once the controls are as another tab sets them just now; not where somebody does something else first. */
  runWith(controls) {
    this.wanted = controls;
    this.settled(this.set ?? {});
  }

  settled(set) {
    this.set = set;
    const wanted = Object.entries(this.wanted ?? {});
    if (!wanted.length || wanted.some(([name, value]) => String(set[name] ?? "") !== String(value ?? ""))) return;
    this.wanted = null;
    this.press();
  }
}

export function mount(element, page) {
  const race = mountRace(element, page);
  new Races(race);
  connectNewcomer(race);
  connectStanding(race, page.props);
  connectTour(race, page.props);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const idle = window.requestIdleCallback ?? setTimeout; // the rest of the page comes first
  idle(() => race.playExample());
}
