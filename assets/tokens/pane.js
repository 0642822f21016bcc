/* One lane's text: tokens appended as they come, a block per line, so that a long text costs no more than a short one. */

import { make } from "../page/elements.js";
import { isTree } from "./story.js";
import { fill, visible } from "./text.js";

export const KEPT = new Set(["accepted", "corrected", "bonus", "plain"]);
const PROMPT_LINES = 4;
const PROMPT_SHOWN = 320;

/** The last lines of the prompt: enough to see what is being continued. */
function promptEnd(prompt) {
  const whole = prompt.replace(/\r\n?/g, "\n").trimStart();
  const end = whole.slice(-PROMPT_SHOWN).split("\n").slice(-PROMPT_LINES).join("\n");
  return visible(end.length < whole.length ? "\u2026" + end : end).split("\n");
}

function tokenSpan(token, round, position) {
  const span = make("span", "t");
  span.dataset.outcome = token.outcome;
  if (token.p != null) span.dataset.p = token.p;
  if (token.q != null) span.dataset.q = token.q;
  const sure = position < 0 ? null : confidence(token);
  if (sure != null) span.style.setProperty("--sure", sure.toFixed(2));
  Object.assign(span, { token, round, position });
  fill(span, token.text, !KEPT.has(token.outcome));
  return span;
}

/** How sure the drafter was of a guess, from 0 to 1; null where the run does not tell. */
function confidence({ id, q, top_draft: top }) {
  return top?.find((each) => each.id === id)?.p ?? (q > 0 && q < 1 ? q : null);
}

/** The guesses of a round that do not stand: a mark with their number, and the guesses themselves for who opens it. */
function foldOf(spans) {
  const fold = make("span", "fold");
  const mark = make("span", "t mark", "\u205d" + spans.length);
  const first = spans.find((span) => span.token.outcome === "rejected") ?? spans[0];
  Object.assign(mark, { token: first.token, round: first.round, position: first.position, guess: first, guesses: spans });
  const branches = isTree(first.round);
  spans.forEach((span, i) => {
    if (branches && i && span.token.parent !== spans[i - 1].position) span.classList.add("branch");
  });
  fold.append(mark, ...spans);
  return fold;
}

/** A token, or what stands in its place: the mark that it is folded into; of a mark that is open, its guess. */
export function shownOf(span) {
  if (span.checkVisibility()) return span;
  return span.guess ?? span.closest(".fold")?.querySelector(".mark") ?? span;
}

export class Pane {
  constructor(section) {
    this.section = section;
    this.stream = section.querySelector(".stream");
    this.note = section.querySelector(".pane-note");
    this.rate = section.querySelector(".rate b");
    this.bar = section.querySelector(".bar i");
    this.following = true;
    this.held = false;
    this.picture = false;
    this.stream.addEventListener("scroll", () => {
      const below = this.stream.scrollHeight - this.stream.scrollTop - this.stream.clientHeight;
      this.following = below < 24;
    }, { passive: true });
    this.clear();
  }

  clear() {
    this.stream.replaceChildren();
    this.line = null;
    this.fresh = null;
    this.all = [];
    this.folds = new Map();
    this.text = "";
    this.following = true;
    this.current = null;
    this.rate.textContent = "\u2013";
    this.note.textContent = "";
    this.bar.style.transform = "scaleX(0)";
    this.section.dataset.state = "idle";
  }

  /** A hint where there is no text yet. */
  hint(text) {
    this.stream.replaceChildren(make("p", "hint", text));
  }

  open(run) {
    this.clear();
    this.section.dataset.state = "running";
    this.goal = run.settings.max_new_tokens;
    this.fresh = document.createDocumentFragment();
    promptEnd(run.prompt).forEach((line, i, lines) => {
      this.newLine();
      this.line.append(make("span", "prompt", i < lines.length - 1 ? line + "\n" : line));
    });
    if (run.environment?.target?.chat && run.settings.chat !== "off") this.newLine(); // an answer, not a continuation
    this.flush();
  }

  newLine() {
    this.line = make("div", "line");
    (this.fresh ||= document.createDocumentFragment()).append(this.line);
  }

  /** A round's tokens: what stands as text, and after it the guesses that do not, folded into a mark. */
  add(round) {
    const spans = round.drafted.map((token, i) => tokenSpan(token, round, i));
    const struck = spans.filter((span) => !KEPT.has(span.token.outcome));
    for (const span of spans) if (KEPT.has(span.token.outcome)) this.place(span, span.token.text);
    if (struck.length) {
      const fold = foldOf(struck);
      this.folds.set(round, fold);
      this.place(fold, "");
    }
    this.all.push(...spans);
    if (!round.emitted) return;
    const own = tokenSpan(round.emitted, round, -1);
    this.place(own, round.emitted.text);
    this.all.push(own);
  }

  /** Put tokens at the end of the text, which grows by `text`. */
  place(element, text) {
    this.append(element, text);
    this.current ||= this.entry(element.matches(".t") ? element : element.querySelector(".t"));
  }

  append(element, text) {
    if (!this.line) this.newLine();
    this.line.append(element);
    this.text += text;
    if (text.endsWith("\n")) this.line = null;
  }

  /** Text that is not told token by token; `kind`: what became of its draft, where that is known. Its element. */
  addText(text, kind) {
    const span = make("span", "swatch");
    if (kind) span.dataset.kind = kind;
    fill(span, text, false);
    this.append(span, text);
    return span;
  }

  /** The one token that Tab reaches, but in a `picture`; arrow keys go on from there. */
  entry(span) {
    if (span === this.current) return span;
    if (this.current) this.current.removeAttribute("tabindex");
    span.tabIndex = this.picture ? -1 : 0;
    return (this.current = span);
  }

  /** Tab reaches no token that has just been folded away, but its mark, and the other way round. */
  enterShown() {
    if (this.current) this.entry(shownOf(this.current));
  }

  /** Show what was added since the last flush. */
  flush() {
    if (this.fresh) {
      this.stream.append(this.fresh);
      this.fresh = null;
    }
    if (this.following && !this.held) this.stream.scrollTop = this.stream.scrollHeight;
  }

  progress(tokens, rate) {
    this.rate.textContent = rate ? rate.toFixed(rate < 100 ? 1 : 0) : "\u2013";
    this.bar.style.transform = "scaleX(" + Math.min(1, tokens / this.goal) + ")";
  }

  end(run) {
    this.section.dataset.state = run.stop_reason === "cancelled" ? "stopped" : "done";
    const ends = { eos: "end of text", length: "length reached", cancelled: "stopped" };
    const how = ends[run.stop_reason] ?? "not finished";
    this.tell(run.metrics.new_tokens + " tokens in " + run.metrics.seconds.toFixed(2) + " s", "\u00b7 " + how);
    this.section.querySelector(".bar").title = how;
  }

  /** A note in the head, whose second part goes where there is no room for both. */
  tell(words, more) {
    this.note.replaceChildren(make("span", "", words), " ", make("span", "", more));
  }

  /** Every token in the order in which it was drafted or written. */
  tokens() {
    return this.all;
  }

  /** The neighbour of a token that an arrow key leads to; undefined at the ends. */
  neighbour(span, key) {
    const all = [...this.stream.querySelectorAll(".t")].filter((each) => each.offsetParent !== null);
    const at = all.indexOf(span);
    if (key === "ArrowRight") return all[at + 1];
    if (key === "ArrowLeft") return all[at - 1];
    if (key === "Home") return all[0];
    if (key === "End") return all[all.length - 1];
    return this.nearestOnNextLine(all, at, key === "ArrowDown" ? 1 : -1);
  }

  nearestOnNextLine(all, at, step) {
    const from = all[at].getBoundingClientRect();
    let best;
    let lineTop;
    for (let i = at + step; all[i]; i += step) {
      const box = all[i].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      lineTop ??= box.top;
      if (Math.abs(box.top - lineTop) > 4) break;
      const distance = Math.abs(box.left - from.left);
      if (!best || distance < best.distance) best = { distance, span: all[i] };
    }
    return best?.span;
  }
}
