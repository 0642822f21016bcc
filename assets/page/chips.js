/* The prompt chips: at first the easiest and the hardest, the rest at a press. Of a row, Tab reaches one; arrow keys, Home and End go on from there. And the caption of the prompt in
   the box: a chip's own, or that a link brought it; what somebody typed has none. */

import { make } from "./elements.js";
import { remember, remembered } from "./opened.js";

const ROW = ".prompt-chips";
const LINKED = "This prompt came with the link.";

const chipsOf = (row) => [...row.querySelectorAll(".chip")].filter((chip) => getComputedStyle(chip).display !== "none");

/** Of its row, the one that Tab reaches. */
function enter(chip) {
  for (const each of chipsOf(chip.closest(ROW))) each.tabIndex = each === chip ? 0 : -1;
}

/** Rows come and go with the pair. */
function prepare() {
  for (const row of document.querySelectorAll(ROW)) {
    const chips = chipsOf(row);
    row.setAttribute("role", "toolbar");
    row.setAttribute("aria-label", "Prompts to begin with, from easy to hard to guess");
    if (chips.length && chips.filter((chip) => chip.tabIndex === 0).length !== 1) enter(chips[0]);
  }
}

function aim(event) {
  const chips = chipsOf(event.target.closest(ROW));
  const at = chips.indexOf(event.target);
  const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: chips.length - 1 };
  return at < 0 ? undefined : chips[steps[event.key]];
}

/** Which prompts lie between is one press away, and stays so. */
function connectFold(place) {
  const more = make("button", "more-chips", "more prompts");
  more.type = "button";
  more.title = "All prompts, from easy to hard to guess";
  const unfold = (moved) => {
    place.dataset.all = "";
    more.hidden = true;
    if (moved) [...place.querySelectorAll(ROW)].map(chipsOf).find((chips) => chips.length)?.[1].focus();
  };
  more.addEventListener("click", () => {
    unfold(true);
    remember("chips", true);
  });
  place.insertBefore(more, place.querySelector("#prompt-note"));
  if (remembered("chips")) unfold(false);
}

/** `note`: the element of the caption, beside the rows; it holds what each prompt shows. */
export function connectChips(note) {
  const place = note.parentElement;
  const caption = note.querySelector("p");
  const prompts = JSON.parse(caption.dataset.prompts);
  const linked = new URLSearchParams(location.search).get("prompt");

  function follow(text) {
    const shown = prompts.find((each) => each.text === text);
    caption.textContent = shown?.note ?? (text && text === linked ? LINKED : "");
    caption.title = caption.textContent;
    for (const chip of place.querySelectorAll(".chip")) {
      const own = shown && chip.textContent.trim() === shown.name;
      if (own) chip.setAttribute("aria-current", "true");
      else chip.removeAttribute("aria-current");
    }
  }

  connectFold(place);
  new MutationObserver(prepare).observe(place, { childList: true });
  document.addEventListener("settings-changed", ({ detail }) => follow(detail.prompt ?? ""));
  place.addEventListener("focusin", (event) => {
    const chip = event.target.closest(`${ROW} .chip`);
    if (chip) enter(chip);
  });
  place.addEventListener("keydown", (event) => {
    if (!event.target.closest(ROW)) return;
    const next = aim(event);
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  prepare();
  /** @type {HTMLTextAreaElement | null} */
  const box = document.querySelector("#prompt textarea");
  follow(box?.value ?? "");
}
