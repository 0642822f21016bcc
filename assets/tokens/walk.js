/* Ways through the tokens of panes: hover, focus and arrow keys lead to a token's card, or to that of the guesses folded
   into a mark, which a click opens. A view has a root, lanes by name (lanes.js) and a card. */

import { listen } from "../page/elements.js";

/** The text under the pointer stands still meanwhile. */
export function connectCard(view) {
  const { root, card } = view;
  const token = (event) => event.target.closest?.(".t");
  const laneOf = (span) => view.lanes[span.closest(".pane").dataset.lane];
  const paneOf = (span) => laneOf(span).pane;
  const show = (span) => card.show(span, laneOf(span).tally?.greedy ?? true);

  for (const { pane } of Object.values(view.lanes)) {
    pane.stream.addEventListener("pointerenter", () => (pane.held = true));
    pane.stream.addEventListener("pointerleave", () => {
      pane.held = false;
      card.hide();
    });
    pane.stream.addEventListener("scroll", () => card.follow(pane.stream), { passive: true });
  }
  root.addEventListener("click", (event) => {
    const fold = event.target.closest?.(".fold");
    if (!fold || view.inspector || !document.getSelection().isCollapsed) return;
    fold.classList.toggle("open");
    paneOf(fold).enterShown();
  });
  root.addEventListener("pointerover", (event) => token(event) && show(token(event)));
  root.addEventListener("pointerdown", (event) => token(event) && paneOf(token(event)).entry(token(event)));
  root.addEventListener("focusin", (event) => token(event) && show(token(event)));
  root.addEventListener("focusout", () => card.hide());
  listen(root, "scroll", () => card.follow(document.documentElement), { passive: true });
  root.addEventListener("keydown", (event) => {
    const span = token(event);
    if (!span || !/^(Arrow|Home$|End$)/.test(event.key) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = paneOf(span).neighbour(span, event.key);
    if (!next) return;
    paneOf(span).entry(next);
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  });
}

/** The switch between text with its refused guesses folded into marks and every guess in its place. */
export function connectAll({ root, lanes }) {
  const all = root.querySelector('[data-tool="all"]');
  all.addEventListener("click", () => {
    const on = all.getAttribute("aria-pressed") !== "true";
    all.setAttribute("aria-pressed", String(on));
    root.toggleAttribute("data-all", on);
    for (const { pane } of Object.values(lanes)) pane.enterShown();
  });
}
