/* What only the race of this page's own buttons has: Run, Run ×5, Watch it slowly, Stop, their keys, and what was asked
   for during a run. */

import { mountRace } from "../tokens/race.js";
import { connectStanding } from "./standing.js";
import { connectTour } from "./tour.js";

const REPEATS = 5;
const NARROW = 820;

function connectButtons(race) {
  let sent = 0;
  let asked = 0;
  let left = 0;
  let watching = false;

  /** @type {(name: string) => HTMLButtonElement | null} */
  const button = (name) => document.querySelector("#" + name);

  race.root.addEventListener("busy", () => {
    document.documentElement.dataset.race = race.root.dataset.state;
    if (button("stop")) button("stop").disabled = !race.busy;
    if (race.busy) return;
    if (race.failed) {
      left = 0;
      watching = false;
    }
    if (left) setTimeout(() => button("run")?.click(), 0);
    else if (watching) setTimeout(watch, 0);
  });
  document.addEventListener("click", (event) => {
    const pressed = event.target.closest?.("#run, #run-five, #watch, #stop")?.id;
    if (pressed === "run") onRun(event);
    else if (pressed === "run-five") ask(REPEATS);
    else if (pressed === "watch") watch();
    else if (pressed === "stop") onStop();
  }, true);
  document.addEventListener("race-over", () => {
    sent = Math.max(0, sent - 1);
    if (sent > 0 || !race.busy) return;
    if (race.status.dataset.kind === "starting") race.say("idle", "");
    race.done();
  });
  document.addEventListener("keydown", (event) => {
    if (!race.root.checkVisibility()) return; // another tab is shown: the keys are its
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      button("run")?.click();
    } else if (event.key === "Escape" && !event.defaultPrevented) {
      if (race.busy) button("stop")?.click();
    }
  });

  /** So many runs one after the other, after the one that is on. */
  function ask(times) {
    asked = left = times;
    if (!race.busy) button("run")?.click();
    else {
      const which = times > 1 ? "your runs start" : "your next run starts";
      race.say("queued", "Queued: " + which + " when this one ends. Stop cancels all.");
    }
  }

  function onRun(event) {
    if (race.busy) {
      event.stopImmediatePropagation();
      event.preventDefault();
      return ask(1);
    }
    if (!left) asked = left = 1;
    left -= 1;
    sent += 1;
    race.prefix = asked > 1 ? "Run " + (asked - left) + " of " + asked + ". " : "";
    race.busy = true;
    if (innerWidth <= NARROW) race.root.scrollIntoView({ block: "start" });
    race.say("starting", race.prefix + "Starting\u2026");
  }

  /** The run shown, slowly; where there is none of what is chosen, once it is over. */
  function watch() {
    watching = race.busy || !race.replay.length || race.root.hasAttribute("data-past");
    if (!watching) race.scrubber.watch();
    else if (!race.busy) button("run")?.click();
  }

  function onStop() {
    left = 0;
    watching = false;
    if (race.busy) race.say("stopping", "Stopping\u2026");
  }
}

export function mount(element, page) {
  const race = mountRace(element, page);
  connectButtons(race);
  connectStanding(race, page.props);
  connectTour(race, page.props);
}
