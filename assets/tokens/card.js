/* The card of one token: what it is, what became of it and why. Shown on hover and on focus. */

import { make } from "../page/elements.js";
import { lawsAt, testWords } from "./story.js";
import { figure, quoted } from "./text.js";

const OUTCOMES = {
  accepted: "Accepted: the target agreed with the draft",
  rejected: "Rejected: the target refused it",
  ignored: "Ignored: it came after the last judged token of its draft",
  corrected: "Corrected: the target\u2019s own word after a refusal",
  bonus: "Bonus: the whole draft was accepted, this one came for free",
  plain: "Plain: the target\u2019s own next token",
};

const GREEDY = "Greedy: only the likeliest stands. ";
const RESIDUAL = "Drawn from what the target has over the draft: max(0, p \u2212 q), renormalised.";

export class Card {
  /** `hint`: what else can be done with a token, said at the foot. */
  constructor(root, hint = "") {
    this.box = root;
    this.hint = hint;
    this.span = null;
  }

  show(span, greedy) {
    if (this.span === span) return;
    this.hide();
    this.span = span;
    span.setAttribute("aria-describedby", this.box.id);
    span.classList.add("shown");
    this.box.replaceChildren(...cardContent(span, greedy));
    if (this.hint) this.box.append(make("p", "card-hint", this.hint));
    this.box.showPopover();
    this.place(span);
  }

  hide() {
    if (!this.span) return;
    this.span.removeAttribute("aria-describedby");
    this.span.classList.remove("shown");
    this.span = null;
    this.box.hidePopover();
  }

  /** Keep to the token while `scroller` moves, and go when the token is out of sight. */
  follow(scroller) {
    if (!this.span) return;
    const seen = scroller === document.documentElement
      ? { top: 0, bottom: innerHeight }
      : scroller.getBoundingClientRect();
    const at = this.span.getBoundingClientRect();
    if (at.top < seen.top - 4 || at.bottom > seen.bottom + 4) this.hide();
    else this.place(this.span);
  }

  /** Below the token's line, or above it where there is no room: the line being read stays free. */
  place(span) {
    const boxes = span.getClientRects();
    const last = boxes[boxes.length - 1] ?? span.getBoundingClientRect();
    const first = boxes[0] ?? last;
    const zoom = this.box.currentCSSZoom ?? 1; // the page may be enlarged: its own lengths are, too
    const [width, height] = [this.box.offsetWidth * zoom, this.box.offsetHeight * zoom];
    const below = last.bottom + 8;
    const above = first.top - 8 - height;
    const top = below + height <= innerHeight - 8 || above < 8 ? below : above;
    const left = Math.max(8, Math.min(last.left - 12, document.documentElement.clientWidth - width - 8));
    this.box.style.left = left / zoom + "px";
    this.box.style.top = top / zoom + "px";
  }
}

/** The guesses folded into a mark: what they were, and why they do not stand. */
function foldContent({ guesses, guess, round }, greedy) {
  const judged = guesses.filter((each) => each.token.outcome === "rejected").length;
  const parts = [judged && judged + " refused", guesses.length - judged && guesses.length - judged + " never judged"];
  const words = plural(guesses.length, "guess", "guesses") + " folded away: " + parts.filter(Boolean).join(", ");
  const row = make("p", "card-guesses");
  for (const { token } of guesses) {
    const chip = make("span", "swatch", quoted(token.text));
    chip.dataset.kind = token.outcome;
    row.append(chip);
  }
  const found = [make("p", "card-outcome", words), row, make("p", "card-where", "round " + (round.index + 1))];
  if (guess.token.q != null) found.push(make("p", "card-test", testWords(round, guess.position, greedy)));
  return found;
}

const plural = (count, one, more) => count + " " + (count === 1 ? one : more);

function cardContent(span, greedy) {
  if (span.guesses) return foldContent(span, greedy);
  const { token, round, position } = span;
  const head = make("div", "card-head");
  head.append(make("code", "card-token", quoted(token.text)), make("span", "card-id", "id " + token.id));
  const parts = [head, outcomeLine(token)];
  const where = position < 0
    ? "round " + (round.index + 1) + ", the target\u2019s own token"
    : "round " + (round.index + 1) + ", " + (position + 1) + " of " + round.drafted.length + " drafted";
  parts.push(make("p", "card-where", where));
  const known = figuresOf(token, round, position, greedy);
  if (known) parts.push(bars(known));
  const rule = greedy && known ? GREEDY : "";
  if (token.q != null) parts.push(make("p", "card-test", rule + testWords(round, position, greedy)));
  else if (token.outcome === "corrected" && !greedy) parts.push(make("p", "card-test", RESIDUAL));
  const rows = make("div", "card-tops");
  if (token.top_target) rows.append(tops("target would say", token.top_target, token.id));
  if (token.top_draft) rows.append(tops("draft would say", token.top_draft, token.id));
  if (rows.childNodes.length) parts.push(rows);
  return parts;
}

export function outcomeLine(token) {
  const line = make("p", "card-outcome");
  line.dataset.kind = token.outcome;
  line.textContent = OUTCOMES[token.outcome];
  return line;
}

/**
 * p and q of a token, each {value} or {most}, as both models have them: greedy decoding makes 0 and 1 of that, and there
 * they are known where the likeliest were recorded. Null where nothing is.
 */
function figuresOf(token, round, position, greedy) {
  if (!greedy) return token.p == null ? null : { p: { value: token.p }, q: token.q == null ? null : { value: token.q } };
  if (!token.top_target) return null;
  const { p, q } = lawsAt(token, round, position, greedy).find((row) => row.id === token.id);
  return { p, q: position < 0 ? null : q };
}

/** p and q as two short bars on the same scale; p alone for the target's own tokens. */
function bars({ p, q }) {
  const box = make("div", "card-bars");
  box.append(bar("p, target", p, "p"));
  if (q) box.append(bar("q, draft", q, "q"));
  return box;
}

function bar(name, { value, most }, kind) {
  const row = make("div", "card-bar");
  const track = make("span", "card-track");
  const filled = make("i", "fill-" + kind + (value == null ? " bound" : ""));
  filled.style.width = 100 * (value ?? most) + "%";
  track.append(filled);
  row.append(make("span", "card-name", name), track, make("b", "", figure({ value, most })));
  return row;
}

function tops(title, candidates, id) {
  const table = make("div", "card-top");
  table.append(make("p", "card-top-title", title));
  for (const candidate of candidates) {
    const row = make("p", candidate.id === id ? "card-candidate chosen" : "card-candidate");
    row.append(make("code", "", quoted(candidate.text)), make("span", "", figure({ value: candidate.p })));
    table.append(row);
  }
  return table;
}
