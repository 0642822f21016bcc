/* A tour of three steps through a round of the visitor's own run: guess, check, keep. Offered after the first run, and
   never again once it was taken or declined. */

import { make } from "../page/elements.js";
import { acceptance, beatsOf, isTree } from "../tokens/story.js";
import { probability, quoted } from "../tokens/text.js";

const SEEN = "speculative-decoding-tour";

function wasSeen() {
  try {
    return localStorage.getItem(SEEN) !== null;
  } catch {
    return false; // a browser that keeps nothing for the page
  }
}

function remember() {
  try {
    localStorage.setItem(SEEN, "seen");
  } catch {
    // it will be offered again
  }
}

/** The round that shows most: with guesses that stood and one that was refused, of a chain before one of a tree. */
export function tellingRound(rounds) {
  const had = (round, outcome) => round.drafted.some((token) => token.outcome === outcome);
  const worth = (round) => (had(round, "rejected") ? 4 : 0) + (had(round, "accepted") ? 2 : 0) + (isTree(round) ? 0 : 1);
  const told = rounds.filter((round) => round.drafted.length).map((round) => ({ round, worth: worth(round) }));
  return told.reduce((best, each) => (each.worth > best.worth ? each : best)).round;
}

const term = (text) => make("b", "", text);
const chip = (token) => make("code", "", quoted(token.text));
const percent = (value) => Math.round(100 * value) + "\u2009%";
const several = (count, word) => count + " " + word + (count === 1 ? "" : "s");

function guess(round, { guesser, greedy }) {
  const [first] = round.drafted;
  const parts = [
    "Models write in ", term("tokens"), ": words or pieces of words. One run of the large model, the target, is a ",
    term("pass"), " and usually gives one token. So first " + guesser + " guesses how the text goes on, which is quick. ",
    "Here it guessed " + several(round.drafted.length, "token") + ", beginning with ", chip(first), ".",
  ];
  if (greedy) return parts;
  return [...parts, " How sure it was of a guess is ", term("q"), ", from 0 to 1: here " + probability(first.q) + "."];
}

function check(round, { greedy }) {
  const judged = round.drafted.find((token) => token.outcome === "rejected") ?? round.drafted[0];
  const stands = judged.outcome === "accepted";
  const looks = "One pass of the target looks at all guesses together, in little more than the time of one token. ";
  if (greedy) {
    const rule = "At temperature 0 a guess stays if it is the very token the target would have put there. ";
    return [looks, rule, chip(judged), stands ? " is." : " is not: struck."];
  }
  const drawn = judged.draw == null ? "" : "; drawn was " + probability(judged.draw);
  return [
    looks, "It says how likely each is in its own eyes: ", term("p"), ". If p is at least q the guess stays. Otherwise it ",
    "stays in only p/q of all cases, by lot: a number from 0 to 1 is drawn and must be less. For ", chip(judged),
    " p is " + probability(judged.p) + ", q " + probability(judged.q) + ": it stays in " + percent(acceptance(judged)),
    " of cases" + drawn + (stands ? ", so it stays." : ", so it is struck."),
  ];
}

function keep(round, { greedy, tokensPerRound, speedup }) {
  const stood = round.drafted.filter((token) => token.outcome === "accepted").length;
  /** @type {(string | Node)[]} */
  const parts = [stood === 1 ? "1 guess stays. " : stood + " guesses stay. "];
  if (round.emitted) {
    const free = round.emitted.outcome === "bonus";
    const whence = free ? "All stood, so the same pass gives one more: " : "After the last that stays, the target puts its own: ";
    parts.push(whence, chip(round.emitted), ". That makes " + several(stood + 1, "token") + " from one pass. ");
  }
  const lot = "The lot is weighted so that the text is as if the target had written alone. ";
  parts.push(greedy ? "The text is the one the target writes alone. " : lot);
  return speedup ? [...parts, ...balance(tokensPerRound, speedup)] : parts;
}

/** Why it is faster, or not: what a round gives over what it takes. */
function balance(tokensPerRound, speedup) {
  const [gave, took] = [tokensPerRound, tokensPerRound / speedup].map((value) => value.toFixed(2));
  const lesson = speedup > 1 ? ". With fewer guesses that stay, or slower guessing, it would lose."
    : ". Too few guesses stayed for the time they took.";
  return [
    "Over the whole run a round gave " + gave + " tokens and took the time of " + took + ": ",
    term(gave + " \u00f7 " + took + " = " + speedup.toFixed(2) + "\u00d7"), lesson,
  ];
}

/** Name, words, and after which of a round's moments the run stands still. */
const STEPS = [
  { name: "Guess", words: guess, until: (round) => round.drafted.length },
  { name: "Check", words: check, until: (round) => beatsOf(round).filter((beat) => beat.kind !== "emit").length },
  { name: "Keep", words: keep, until: () => Infinity },
];

class Tour {
  constructor(race, drafters) {
    this.race = race;
    this.drafters = drafters;
    this.box = make("section", "tour");
    this.box.hidden = true;
    this.box.setAttribute("aria-label", "Tour of a round");
    this.offered = make("p", "tour-offer");
    race.root.querySelector(".foot .tools").after(this.offered);
    race.root.querySelector(".stage-panel").before(this.box);
    this.opener = make("button", "tool", "Tour");
    this.opener.type = "button";
    this.opener.title = "A round of this run in three steps: guess, check, keep";
    this.opener.addEventListener("click", () => this.show(0));
    race.root.querySelector(".tools").prepend(this.opener);
    race.root.addEventListener("busy", () => this.follow());
    race.root.addEventListener("replay", () => this.follow());
    this.follow();
  }

  get possible() {
    const run = this.race.lanes.speculative.run;
    return Boolean(run) && !this.race.busy && !this.race.example && run.rounds.some((round) => round.drafted.length);
  }

  /** Offered once, and gone with the run that it speaks of. */
  follow() {
    const { race, possible } = this;
    this.opener.disabled = !possible;
    if (!possible) this.hide();
    else if (this.at !== undefined && !race.replay.active) this.close();
    else if (!race.replay.active && !wasSeen()) this.offer();
    else if (this.at === undefined) this.hide();
  }

  hide() {
    this.at = undefined;
    this.box.hidden = true;
    this.offered.replaceChildren();
    delete this.race.root.dataset.tour;
  }

  close() {
    remember();
    const inside = this.box.contains(document.activeElement);
    this.hide();
    if (this.race.replay.active) this.race.replay.leave();
    if (inside) this.opener.focus({ preventScroll: true });
  }

  offer() {
    const buttons = buttonsOf([["Show me", () => this.show(0)], ["No, thanks", () => this.close()]]);
    this.offered.replaceChildren("New to this? ", term("Guess, check, keep"), " in three steps. ", ...buttons);
  }

  show(at) {
    const { race } = this;
    const { rounds } = race.lanes.speculative.run;
    const round = tellingRound(rounds);
    this.at = at;
    race.root.dataset.tour = "";
    race.inspector.close();
    race.replay.pause();
    race.replay.seek(rounds.indexOf(round), STEPS[at].until(round));
    const words = STEPS[at].words(round, this.facts());
    const next = STEPS[at + 1]?.name.toLowerCase();
    const buttons = [next ? ["Next: " + next, () => this.show(at + 1)] : ["Done", () => this.close()]];
    if (at > 0) buttons.push(["Back", () => this.show(at - 1)]);
    if (next) buttons.push(["Close", () => this.close()]);
    this.fill([make("b", "tour-step", at + 1 + " of 3, " + STEPS[at].name.toLowerCase() + ": "), ...words], buttons);
    this.box.querySelector("button").focus({ preventScroll: true });
    const narrow = matchMedia("(width <= 820px)").matches; // there the panes would go out above
    if (narrow) race.root.querySelector(".lanes").scrollIntoView({ block: "start" });
    else race.root.querySelector(".stage-panel").scrollIntoView({ block: "nearest" });
  }

  facts() {
    const { speculative, plain } = this.race.documents;
    const { settings, metrics } = speculative;
    const speedup = plain?.metrics?.tokens_per_second && metrics.tokens_per_second / plain.metrics.tokens_per_second;
    const { method, temperature } = settings;
    const { guesser } = this.drafters[method];
    return { guesser, greedy: temperature === 0, tokensPerRound: metrics.tokens_per_round, speedup };
  }

  fill(words, buttons) {
    const text = make("p", "tour-words");
    text.setAttribute("aria-live", "polite");
    text.append(...words);
    const row = make("div", "tour-buttons");
    row.append(...buttonsOf(buttons));
    this.offered.replaceChildren();
    this.box.replaceChildren(text, row);
    this.box.hidden = false;
  }
}

/** `drafters`: who guesses, by method. */
/** A button for each name and what it does. */
function buttonsOf(named) {
  return named.map(([name, act]) => {
    const button = make("button", "tool", name);
    button.type = "button";
    button.addEventListener("click", act);
    return button;
  });
}

export function connectTour(race, { drafters }) {
  return new Tour(race, drafters);
}
