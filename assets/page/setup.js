/* The line beside the title: the pair and the gear open the side panel; the method chosen there can be chosen here, too.
   And what a newcomer sees: what it takes to press Run, until something ran. */

import { aroundTabs, sidebarIsOpen, toggleSidebar } from "./gradio.js";
import { remember, remembered } from "./opened.js";

const NARROW = 820;

/** The panel's radio buttons of methods, and the select that stands for them beside the title. */
function connectMethod(panel, select) {
  const radios = () => [...panel.querySelectorAll('#method input[type="radio"]')];

  function draw() {
    const options = radios().map((radio) => {
      const [name] = radio.closest("label").textContent.trim().split("\n");
      return new Option(name, radio.value, radio.checked, radio.checked);
    });
    const same = options.length === select.length && options.every((each, i) => each.value === select[i].value);
    if (!same) select.replaceChildren(...options);
    const chosen = radios().find((radio) => radio.checked);
    if (chosen && select.value !== chosen.value) select.value = chosen.value;
  }

  new MutationObserver(draw).observe(panel, { childList: true, subtree: true });
  panel.addEventListener("change", draw);
  document.addEventListener("settings-changed", draw);
  select.addEventListener("change", () => radios().find((radio) => radio.value === select.value)?.click());
  draw();
}

export function connectSetup(panel, select) {
  connectMethod(panel, select);
  const mark = () => {
    const open = sidebarIsOpen(panel);
    aroundTabs().toggleAttribute("data-shut", !open);
    for (const each of document.querySelectorAll("[data-settings-toggle]")) each.setAttribute("aria-expanded", String(open));
  };
  new MutationObserver(mark).observe(panel, { attributes: true, attributeFilter: ["class"] });
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-settings-toggle]")) return;
    remember("settings", !sidebarIsOpen(panel));
    toggleSidebar(panel);
  });
  if (remembered("settings") && innerWidth > NARROW && !sidebarIsOpen(panel)) toggleSidebar(panel);
  mark();
}

/** Until a run of the visitor's own is shown, ever, what one does with a run is not there yet (its place is kept). */
export function connectNewcomer(race) {
  const { root } = race;
  const place = aroundTabs();
  const settled = () => {
    if (!race.shown.length || race.example) return;
    place.removeAttribute("data-new");
    remember("ran", true);
  };
  place.toggleAttribute("data-new", !remembered("ran"));
  root.addEventListener("shown", settled);
  settled();
}
