/* Explain, where it is in sight: a race or a comparison that ends is the newest run, and is shown. */

import { listen } from "../page/elements.js";
import { openAccordion, openTab } from "../page/gradio.js";

/** What the empty tab's button does: the Playground's Run, to be seen there. */
export function runPrompt() {
  openTab("playground");
  document.querySelector("#run").click();
}

/** Words that lead to what measures them. */
document.addEventListener("click", (event) => {
  const id = event.target.closest?.(".explain [data-open]")?.dataset.open;
  if (!id) return;
  event.preventDefault();
  openTab(id === "many-texts" ? "tune" : "compare");
  openAccordion(id);
});

/** What is open stays open where another round or run takes its place. */
function keepOpen(element) {
  const open = new Set();
  element.addEventListener("toggle", ({ target }) => {
    if (target.isConnected) open[target.open ? "add" : "delete"](target.dataset.question);
  }, true);
  new MutationObserver(() => {
    for (const card of element.querySelectorAll(".question:not([open])")) card.open = open.has(card.dataset.question);
  }).observe(element, { childList: true, subtree: true });
}

export function mount(element, { trigger }) {
  keepOpen(element);
  for (const over of /** @type {const} */ (["race-over", "comparison-over"])) {
    listen(element, over, () => element.offsetParent !== null && trigger("refresh"));
  }
}
