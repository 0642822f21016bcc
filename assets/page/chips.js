/* The prompt chips: of a row, Tab reaches one; arrow keys, Home and End go on from there. */

const ROW = ".prompt-chips";

const chipsOf = (row) => [...row.querySelectorAll(".chip")];

/** Of its row, the one that Tab reaches. */
function enter(chip) {
  for (const each of chipsOf(chip.closest(ROW))) each.tabIndex = each === chip ? 0 : -1;
}

/** Rows come and go with the pair. */
function prepare() {
  for (const row of document.querySelectorAll(ROW)) {
    const chips = chipsOf(row);
    row.setAttribute("role", "toolbar");
    row.setAttribute("aria-label", "Prompts to begin with");
    if (chips.length && chips.filter((chip) => chip.tabIndex === 0).length !== 1) enter(chips[0]);
  }
}

function aim(event) {
  const chips = chipsOf(event.target.closest(ROW));
  const at = chips.indexOf(event.target);
  const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: chips.length - 1 };
  return at < 0 ? undefined : chips[steps[event.key]];
}

/** `note`: the element of the sentence above the rows, in whose parent they stand. */
export function connectChips(note) {
  const place = note.parentElement;
  new MutationObserver(prepare).observe(place, { childList: true });
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
}
