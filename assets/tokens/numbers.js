/* The number between the panes and the three behind it, the count of each outcome, and what the same run gave when it
   was repeated. */

const SAME = 0.03, EVEN = 1.1;

/** Speed-ups of this visit by what was run. */
export class Repeats {
  constructor() {
    this.found = new Map();
  }

  /** One more run of both lanes; all speed-ups of the same settings and prompt so far. */
  add(speculative, plain) {
    const key = JSON.stringify([speculative.settings, speculative.prompt_ids]);
    const all = this.found.get(key) ?? [];
    all.push(speculative.metrics.tokens_per_second / plain.metrics.tokens_per_second);
    this.found.set(key, all);
    return all;
  }
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** "faster" or "slower" where all that was measured says so, by more than nobody feels; else "about the same", or where
   it may be more than that, "too noisy to tell". */
export function wordFor(speedup, [low, high]) {
  if (low > 1 && speedup > 1 + SAME) return "faster";
  if (high < 1 && speedup < 1 - SAME) return "slower";
  return speedup <= EVEN && speedup >= 1 / EVEN ? "about the same" : "too noisy to tell";
}

export class Numbers {
  constructor(root) {
    this.root = root;
    this.fields = {};
    for (const field of root.querySelectorAll("[data-number]")) this.fields[field.dataset.number] = field;
    this.counts = {};
    for (const swatch of root.querySelectorAll(".legend .swatch")) {
      this.counts[swatch.dataset.kind] = swatch.nextElementSibling;
    }
    this.clear();
  }

  clear() {
    this.range = null;
    this.all = [];
    this.clearSpeedup();
    for (const name of ["accepted", "tokens"]) this.set(name, "\u2013");
    for (const count of Object.values(this.counts)) count.textContent = "";
  }

  /** What both lanes are needed for. */
  clearSpeedup() {
    this.set("speedup", "");
    this.set("speedup-word", "");
    this.set("spread", "");
    this.set("cost", "\u2013");
    delete this.root.dataset.won;
  }

  /** Between which speed-ups the race's own noise leaves it, and all speed-ups of the same run in this visit. */
  settle(range, all) {
    this.range = range ?? null;
    this.all = all;
  }

  set(name, text) {
    if (this.fields[name].textContent !== text) this.fields[name].textContent = text;
  }

  draw(speculative, plain) {
    if (!speculative) return;
    for (const [kind, count] of Object.entries(this.counts)) count.textContent = speculative.outcomes[kind];
    const acceptance = speculative.acceptance;
    this.set("accepted", acceptance == null ? "\u2013" : Math.round(100 * acceptance) + "\u2009%");
    this.set("tokens", speculative.rounds ? speculative.tokensPerRound.toFixed(2) : "\u2013");
    if (!plain?.tokens || !speculative.tokens) return this.clearSpeedup();
    this.drawSpeedup(speculative.rate / plain.rate);
    this.set("cost", (speculative.tokensPerRound * plain.rate / speculative.rate).toFixed(2));
  }

  /** Of a run alone its own noise; of several the speed-ups that were seen. */
  drawSpeedup(speedup) {
    const several = this.all.length > 1;
    const range = several ? [Math.min(...this.all), Math.max(...this.all)] : (this.range ?? [speedup, speedup]);
    const word = wordFor(speedup, range);
    this.set("speedup", (word === "faster" || word === "slower" ? "" : "\u2248\u2009") + speedup.toFixed(2) + "\u00d7");
    this.set("speedup-word", word);
    this.root.dataset.won = word === "faster";
    const ends = range.map((value) => value.toFixed(2)).join(" to ") + "\u00d7";
    const median_ = several ? ", median\u00a0" + median(this.all).toFixed(2) + "\u00d7" : "";
    this.set("spread", several ? this.all.length + " runs: " + ends + median_ : this.range ? "measured: " + ends : "");
    this.fields.spread.toggleAttribute("data-several", several);
  }

  /** The numbers as a sentence, for those who hear the page. */
  sentence() {
    const { speedup, accepted, tokens } = this.fields;
    if (!speedup.textContent) return "";
    return speedup.textContent.replace("\u2248\u2009", "about ").replace("\u00d7", " times the speed of plain decoding; ") +
      accepted.textContent + " accepted; " + tokens.textContent + " tokens per target pass.";
  }
}
