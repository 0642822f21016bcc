/* Page-wide habits: Run in focus when the page opens, the help strip of the sidebar, the sidebar
   shut on a phone. */

const HELP_AT_REST = "Point at a control to read what it does.";
const NARROW = 820;

function whenThere(selector, use) {
  const found = document.querySelector(selector);
  if (found) use(found);
  else setTimeout(() => whenThere(selector, use), 50);
}

/** What a control means, in the strip at the foot of the sidebar: nothing moves while the pointer wanders. */
function connectHelp(sidebar) {
  const strip = () => sidebar.querySelector(".help p");
  const explain = (event) => {
    const block = event.target.closest?.(".block");
    const info = block?.querySelector(".info-text");
    const place = strip();
    if (place) place.textContent = info?.textContent.trim() || HELP_AT_REST;
  };
  sidebar.addEventListener("pointerover", explain);
  sidebar.addEventListener("focusin", explain);
}

whenThere("#run", (run) => (run.querySelector("button") ?? run).focus({ preventScroll: true }));
whenThere("#sidebar", (sidebar) => {
  connectHelp(sidebar);
  if (innerWidth <= NARROW && sidebar.classList.contains("open")) sidebar.querySelector(".toggle-button").click();
});
