/* Page-wide habits: Run in focus when the page opens, its keys, those of Stop and of the chips, the side panel and the
   help strip at its foot. */

import { connectChips } from "./chips.js";
import { infoOf } from "./gradio.js";
import { connectPresentation } from "./present.js";
import { connectSetup } from "./setup.js";

const HELP_AT_REST = (matchMedia("(hover: none)").matches ? "Tap" : "Point at") + " a control to read what it does.";

function whenThere(selector, use) {
  const found = document.querySelector(selector);
  if (found) use(found);
  else setTimeout(() => whenThere(selector, use), 50);
}

/** What a control of the page means, in the strip at the foot of the sidebar: nothing moves while the pointer wanders. */
function connectHelp(sidebar) {
  const strip = () => sidebar.querySelector(".help p");
  const explain = (event) => {
    const place = strip();
    if (place) place.textContent = infoOf(event.target) || HELP_AT_REST;
  };
  const rest = strip();
  if (rest) rest.textContent = HELP_AT_REST;
  for (const place of [sidebar, document.querySelector("#tabs")]) {
    place?.addEventListener("pointerover", explain);
    place?.addEventListener("focusin", explain);
  }
}

/** The keys of a button, on it for those who see it and as a shortcut for those who hear it. */
function showKeys(button, shown, keys, title) {
  button.dataset.keys = shown;
  button.title = title;
  button.setAttribute("aria-keyshortcuts", keys);
}

export function mount() {
  const apple = /Mac|iPhone|iPad/.test(navigator.platform);
  whenThere("#run", (run) => showKeys(run, apple ? "\u2318\u23ce" : "Ctrl \u23ce", "Control+Enter Meta+Enter", "Race both lanes on this prompt"));
  whenThere("#stop", (stop) => showKeys(stop, "Esc", "Escape", "Stop your runs; what is written so far stays"));
  whenThere("#watch", (watch) => (watch.title = "This prompt at reading pace, both lanes on one slowed clock; runs it first if it has not run"));
  whenThere("#stop", (stop) => (stop.disabled = document.documentElement.dataset.race !== "busy"));
  whenThere("#run", (run) => run.focus({ preventScroll: true }));
  whenThere("#prompt-note", connectChips);
  connectPresentation();
  whenThere("#sidebar", (sidebar) => {
    connectHelp(sidebar);
    // Gradio's charts look for another width only when the window's changes.
    sidebar.addEventListener("transitionend", () => dispatchEvent(new Event("resize")));
    whenThere("[data-method]", (select) => connectSetup(sidebar, select));
  });
}
