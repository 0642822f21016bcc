/* What only the race of this page's own Run button has: Run, Stop, their keys, and a run asked for during another. */

import { mountRace } from "../tokens/race.js";

const EMPTY =
  "Press Run: a small draft model proposes the next few tokens, the target checks them all in one pass, and beside it the " +
  "same target writes alone. Same text, less time.";

function connectButtons(race) {
  let sent = 0;
  let queued = false;

  race.root.addEventListener("busy", () => {
    document.documentElement.dataset.race = race.root.dataset.state;
    if (race.busy || !queued) return;
    queued = false;
    setTimeout(() => document.querySelector("#run")?.click(), 0);
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest?.("#run")) onRun(event);
    else if (event.target.closest?.("#stop")) onStop();
  }, true);
  document.addEventListener("race-over", () => {
    sent = Math.max(0, sent - 1);
    if (sent > 0 || !race.busy) return;
    if (race.status.dataset.kind === "starting") race.say("idle", EMPTY);
    race.done();
  });
  document.addEventListener("keydown", (event) => {
    if (!race.root.checkVisibility()) return; // another tab is shown: the keys are its
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      document.querySelector("#run")?.click();
    } else if (event.key === "Escape" && !event.defaultPrevented) {
      if (race.busy) document.querySelector("#stop")?.click();
    }
  });

  function onRun(event) {
    if (!race.busy) {
      sent += 1;
      race.busy = true;
      race.say("starting", "Starting\u2026");
      return;
    }
    event.stopImmediatePropagation();
    event.preventDefault();
    queued = true;
    race.say("queued", "Queued: your next run starts when this one ends. Stop cancels both.");
  }

  function onStop() {
    queued = false;
    if (race.busy) race.say("stopping", "Stopping\u2026");
  }
}

export function mount(element, page) {
  const race = mountRace(element, page);
  race.say("idle", EMPTY);
  connectButtons(race);
}
