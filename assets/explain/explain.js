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
  openTab("compare");
  openAccordion(id);
});

export function mount(element, { trigger }) {
  for (const over of /** @type {const} */ (["race-over", "comparison-over"])) {
    listen(element, over, () => element.offsetParent !== null && trigger("refresh"));
  }
}
