/* What our scripts rely on of how Gradio builds its page; a test holds each to a running one. */

/** The `info` of the control that an element is part of: every component is a .block, its info an .info-text in it. */
export function infoOf(element) {
  return element.closest?.(".block")?.querySelector(".info-text")?.textContent.trim() ?? "";
}

/** A sidebar is of the class `open` while it is, and holds the button that opens and shuts it. */
export function sidebarIsOpen(sidebar) {
  return sidebar.classList.contains("open");
}

export function toggleSidebar(sidebar) {
  sidebar.querySelector(".toggle-button").click();
}

/** What holds the tabs, header and bar. A sheet's rules reach from there on, as Gradio rewrites them. */
export function aroundTabs() {
  return document.querySelector("#tabs").parentElement;
}

/** A tab's button carries the id of its gr.Tab. */
export function openTab(id) {
  document.querySelector(`#tabs [role="tab"][data-tab-id="${id}"]`).click();
}

/** An accordion's head is the button before its content, and says in aria-expanded or its class whether it is open. That
    of a tab which is opened for the first time is not there yet, and hears nothing before it is drawn. */
export function openAccordion(id) {
  const find = () => document.querySelector(`#${id} button.label-wrap`);
  const open = () => {
    const head = find();
    if (!head.classList.contains("open")) head.click();
    head.scrollIntoView({ block: "center" });
  };
  if (find()) return open();
  const waiting = new MutationObserver(() => {
    if (!find()) return;
    waiting.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(open));
  });
  waiting.observe(document.querySelector("#tabs"), { childList: true, subtree: true });
}
