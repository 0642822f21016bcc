/* Presentation: the sidebar shut, larger type, and of the Playground what an audience looks at. */

import { aroundTabs, openTab, sidebarIsOpen, toggleSidebar } from "./gradio.js";

const HTML = document.documentElement;

export function presenting() {
  return HTML.hasAttribute("data-present");
}

function present(on) {
  if (on) {
    openTab("playground");
    const sidebar = document.querySelector("#sidebar");
    if (sidebarIsOpen(sidebar)) toggleSidebar(sidebar);
  }
  for (const place of [HTML, aroundTabs()]) place.toggleAttribute("data-present", on);
  const toggle = document.querySelector("[data-present-toggle]");
  toggle.setAttribute("aria-pressed", String(on));
  toggle.textContent = on ? "End presentation" : "Present";
}

export function connectPresentation() {
  document.addEventListener("click", (event) => {
    if (event.target.closest?.("[data-present-toggle]")) present(!presenting());
  });
  addEventListener("keydown", (event) => { // of the window: whatever Escape closes in the page comes first
    if (event.key === "Escape" && !event.defaultPrevented && presenting() && HTML.dataset.race !== "busy") present(false);
  });
}
