/* What the panes show beside what is chosen: whose run it is where that is another, and before the first what Run does. */

import { listen } from "../page/elements.js";

/** Before the first run: what will run; `drafter` says who guesses. */
function promise(drafter) {
  if (!drafter) return "Press Run: the target writes alone, a token for each of its passes.";
  return "Press Run: " + drafter.guesser + " guesses ahead, the target checks.";
}

const short = (name) => String(name).replace(/\/+$/, "").split("/").at(-1);

/** Models and method of a run, by their short names. */
function described({ environment, settings }) {
  const models = [environment?.target, environment?.draft].filter(Boolean).map((model) => short(model.name));
  return models.join(" + ") + " (method " + settings.method + ")";
}

/** A sentence on whose result is shown where it is not that of the controls, or nothing. */
function past(race, chosen) {
  const [lane] = race.shown;
  if (!lane) return "";
  const whose = described(lane.run);
  if (race.failed) return "That run gave nothing to show. Shown is the one before it: " + whose + ".";
  if (race.example) {
    const other = chosen && chosen.prompt !== lane.run.prompt;
    return (other ? "An example, of another prompt than yours," : "An example,") + " recorded " + race.example + ". Press Run for your own.";
  }
  if (!race.asked) return "Opened from History: a run of " + whose + ".";
  const other = Object.entries(race.asked).some(([name, value]) => String(chosen[name] ?? "") !== String(value ?? ""));
  return other ? "Shown is a run of " + whose + "; what is chosen now has not run yet." : "";
}

/** `method`: what is chosen when the page opens; `drafters`: who guesses, by method. */
export function connectStanding(race, { method, drafters }) {
  const { root } = race;
  const label = root.querySelector(".past");
  let chosen = null;
  let said = "";

  /** Where nothing was said of a run yet; plain decoding alone has one pane from the start. */
  function sayPromise() {
    if (!race.shown.length && !race.busy) root.toggleAttribute("data-alone", (chosen?.method ?? method) === "plain");
    const { kind } = race.status.dataset;
    if (race.shown.length || kind !== "idle" || race.status.firstElementChild.textContent !== said) return;
    said = promise(drafters[chosen?.method ?? method]);
    race.say("idle", said);
  }

  function draw() {
    const known = chosen || race.example;
    const text = known && !race.busy ? past(race, chosen) : label.textContent;
    if (label.textContent !== text) label.textContent = text;
    label.hidden = !text;
    root.toggleAttribute("data-past", Boolean(text));
    sayPromise();
  }

  root.addEventListener("busy", draw);
  root.addEventListener("shown", () => {
    label.textContent = "";
    draw();
  });
  listen(root, "settings-changed", ({ detail }) => {
    chosen = detail;
    draw();
  });
  if (!race.shown.length) race.say("idle", said);
  draw();
}
