/* Stands in for Gradio in a file of its own: the race gets its element and, as its value, the embedded document. */

import { make } from "../page/elements.js";
import { saveText } from "../page/hand_over.js";
import { mountRace } from "./race.js";
import { visible } from "./text.js";

const textOf = (id) => document.getElementById(id).textContent;

/** Light or dark as the system is. */
function followTheSystem() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => document.documentElement.classList.toggle("dark", dark.matches);
  dark.addEventListener("change", follow);
  follow();
}

/** The race's events, a line each, as the page gets them from its server. */
export function eventsOf({ runs }, verdict) {
  /** @type {{ e: string, [more: string]: any }[]} */
  const events = [{ e: "begin", id: "saved", from: 0 }];
  for (const { rounds, metrics, token_ids, text, stop_reason, ...head } of runs) {
    const lane = head.settings.method === "plain" ? "plain" : "speculative";
    events.push({ e: "open", lane, run: head });
    const prefill = metrics.prefill_seconds + metrics.draft_prefill_seconds;
    rounds.forEach((round, i) => events.push(i ? { e: "round", lane, round } : { e: "round", lane, round, prefill }));
    events.push({ e: "end", lane, run: { metrics, token_ids, text, stop_reason } });
  }
  return [...events, verdict, { e: "done" }].map((event) => JSON.stringify(event) + "\n").join("");
}

/** What the panes have no room for: the whole prompt, every setting, and the race itself to keep. */
function tellMore({ runs: [run] }) {
  document.getElementById("prompt").textContent = visible(run.prompt);
  const list = document.getElementById("settings");
  for (const [name, value] of Object.entries(run.settings)) {
    list.append(make("dt", "", name.replaceAll("_", " ")), make("dd", "", visible(String(value ?? "\u2013"))));
  }
  document.getElementById("save").addEventListener("click", () => {
    saveText({ name: "race.json", type: "application/json", text: textOf("document") });
  });
}

export function mount() {
  followTheSystem();
  const saved = JSON.parse(textOf("document"));
  const value = eventsOf(saved, JSON.parse(textOf("verdict")));
  mountRace(document.getElementById("component"), { props: { value }, watch() {} });
  tellMore(saved);
}
