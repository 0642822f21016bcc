/* A round as data: the order in which things happened in it, and what is known of both models' laws. No elements. */

import { seconds } from "./tally.js";
import { probability } from "./text.js";

/** Whether the draft branches: some token does not continue the one drafted before it. */
export function isTree(round) {
  return round.drafted.some((token, i) => (token.parent ?? -1) !== i - 1);
}

/** Drafted tokens that continue the same text as drafted token `position` (or as the emitted token: -1), in order. */
export function siblingsOf(round, position) {
  const parent = position < 0 ? lastAccepted(round) : round.drafted[position].parent;
  return round.drafted.filter((token) => (token.parent ?? -1) === (parent ?? -1));
}

export function lastAccepted(round) {
  return round.drafted.findLastIndex((token) => token.outcome === "accepted");
}

/** Indices of the judged drafts in the order in which the target tests them: down the path, siblings in turn. */
function judgedOrder(round) {
  const order = [];
  let node = -1;
  while (node !== null) {
    let next = null;
    round.drafted.forEach((token, i) => {
      if ((token.parent ?? -1) !== node || next !== null || token.outcome === "ignored") return;
      order.push(i);
      if (token.outcome === "accepted") next = i;
    });
    node = next;
  }
  return order;
}

/**
 * The moments of a round, in order: {kind: "draft" | "judge" | "emit", index, at}, `at` in seconds of engine time since
 * the round began. The target judges all in one pass: the judgements are told one by one over the time of that pass, so
 * that a clock which goes evenly leaves time to read each.
 */
export function beatsOf(round) {
  const drafting = round.draft_seconds;
  const share = drafting / (round.drafted.length || 1);
  const beats = round.drafted.map((_, index) => ({ kind: "draft", index, at: share * (index + 1) }));
  const told = judgedOrder(round).map((index) => ({ kind: "judge", index }));
  if (round.emitted) told.push({ kind: "emit", index: -1 });
  const each = (seconds(round) - drafting) / (told.length || 1);
  beats.push(...told.map((beat, i) => ({ ...beat, at: drafting + each * (i + 1) })));
  return beats;
}

/** How many of a round's moments are told while the target checks it. */
export function toldBeats(round) {
  return judgedOrder(round).length + (round.emitted ? 1 : 0);
}

/** Which part of a round is on: "guess", "check" or "keep"; of a plain step there is only the last. */
export function phaseOf(round, beat) {
  if (!round.drafted.length || beat?.kind === "emit") return "keep";
  return beat?.kind === "judge" ? "check" : "guess";
}

/** How far a round has come after `count` of its beats. */
export class Moment {
  constructor(round, count, beats = beatsOf(round)) {
    const done = beats.slice(0, count);
    this.beat = done.at(-1) ?? null;
    this.drafted = done.filter((beat) => beat.kind === "draft").length;
    this.judged = new Set(done.filter((beat) => beat.kind === "judge").map((beat) => beat.index));
    this.emitted = done.some((beat) => beat.kind === "emit");
    this.over = count >= beats.length;
    const tests = beats.filter((beat) => beat.kind === "judge").length;
    this.decided = this.over || (tests > 0 && this.judged.size === tests);
  }

  /** Whether drafted token i waits for its judgement. */
  pending(i) {
    return !this.decided && !this.judged.has(i);
  }
}

/** What a beat means, in a sentence. */
export function beatWords(round, beat, greedy) {
  const drafted = round.drafted.length;
  if (!beat) return drafted ? "The drafter begins: " + drafted + " to propose." : "Nothing is drafted: a plain step.";
  if (beat.kind === "draft") {
    const where = "Proposed, " + (beat.index + 1) + " of " + drafted;
    const sure = greedy ? "." : ", with q = " + probability(round.drafted[beat.index].q) + ".";
    return where + sure + (beat.index + 1 === drafted ? " Now the target looks at all of them in one pass." : "");
  }
  if (beat.kind === "emit") return EMITTED[round.emitted.outcome];
  const token = round.drafted[beat.index];
  const accepted = token.outcome === "accepted";
  const test = testWords(round, beat.index, greedy);
  if (accepted || siblingsOf(round, beat.index).some((each) => each.outcome === "accepted")) return test;
  const ignored = round.drafted.filter((each) => each.outcome === "ignored").length;
  const rest = { 0: "", 1: " The one left is not judged." }[ignored] ?? " The " + ignored + " left are not judged.";
  return test + rest;
}

const EMITTED = {
  corrected: "The target writes its own token instead.",
  bonus: "The whole draft stands, and the same pass gives one token more.",
  plain: "A plain step: one pass of the target, one token.",
};

/** The test of drafted token `position` in words, with its numbers where they are those of the test. */
export function testWords(round, position, greedy) {
  const token = round.drafted[position];
  const stands = token.outcome === "accepted";
  if (token.outcome === "ignored") return "Never judged.";
  if (greedy) return stands ? "It is the target\u2019s likeliest token: accepted." : "It is not the target\u2019s likeliest token: refused.";
  const verdict = (token.draw == null ? "" : "; drew " + probability(token.draw)) + (stands ? ": accepted." : ": refused.");
  if (laterSibling(round, position)) return "Tested against what its refused siblings left of p" + verdict;
  return "Accepted with probability min(1, p/q) = " + probability(acceptance(token)) + verdict;
}

/** Chance of acceptance of a first sibling, min(1, p/q). */
export function acceptance(token) {
  return token.q > 0 ? Math.min(1, token.p / token.q) : 1;
}

/** Whether siblings were tested before this token: the p and q of its own test are not those recorded with it. */
export function laterSibling(round, position) {
  return siblingsOf(round, position)[0] !== round.drafted[position];
}

/**
 * What is known of the target's p and the drafter's q at a token's place: rows {id, text, p, q} for the union of both
 * lists of likeliest tokens, the likeliest of either first. A value is {value} where it is known, else {most}: more
 * than that it cannot be. q is null throughout where nobody drafted at this place.
 */
export function lawsAt(token, round, position, greedy) {
  const siblings = siblingsOf(round, position);
  const p = new KnownLaw(token.top_target ?? siblings[0]?.top_target ?? []);
  const q = siblings.length ? new KnownLaw(siblings[0].top_draft ?? []) : null;
  const here = position < 0 ? [...siblings, token] : siblings;
  const sure = siblings.length > 0 && !siblings[0].top_draft;
  for (const each of here) {
    if (!greedy) p.add(each);
    if (each.q != null && (sure || !greedy)) q.add(each, each.q);
  }
  if (q && sure) q.rest = 0;
  const tokens = new Map([...p.texts, ...(q?.texts ?? []), ...here.map((each) => [each.id, each.text])]);
  const rows = [...tokens].map(([id, text]) => ({ id, text, p: p.of(id), q: q && q.of(id) }));
  const size = (row) => Math.max(row.p.value ?? 0, row.q?.value ?? 0);
  return rows.sort((a, b) => size(b) - size(a));
}

/** A law of which only the likeliest tokens are known, and thereby how much any other can have at most. */
class KnownLaw {
  constructor(top) {
    this.values = new Map(top.map((each) => [each.id, each.p]));
    this.texts = top.map((each) => [each.id, each.text]);
    const left = Math.max(0, 1 - top.reduce((sum, each) => sum + each.p, 0));
    this.rest = Math.min(top.at(-1)?.p ?? 1, left);
  }

  add(token, value = token.p) {
    if (value != null && !this.values.has(token.id)) this.values.set(token.id, value);
  }

  of(id) {
    if (this.values.has(id)) return { value: this.values.get(id) };
    return this.rest > 0 ? { most: this.rest } : { value: 0 };
  }
}

/** norm(max(0, p - q)) over known rows; a q that is not known counts as 0, a p that is not known leaves its row out. */
export function residualOf(rows) {
  const left = rows.filter((row) => row.p.value != null).map((row) => ({
    ...row,
    left: Math.max(0, row.p.value - (row.q?.value ?? 0)),
  }));
  const sum = left.reduce((total, row) => total + row.left, 0);
  return sum > 0 ? left.map((row) => ({ ...row, share: row.left / sum })) : [];
}
