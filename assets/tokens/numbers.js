/* The four numbers between the panes, the count of each outcome, and what the same run gave when it was repeated. */

const RATIO = "speculative \u00f7 plain tokens/s";

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

export class Numbers {
  constructor(root) {
    this.root = root;
    this.fields = {};
    for (const field of root.querySelectorAll("[data-number]")) this.fields[field.dataset.number] = field;
    this.counts = {};
    for (const swatch of root.querySelectorAll(".legend .swatch")) {
      this.counts[swatch.dataset.kind] = swatch.nextElementSibling;
    }
  }

  clear() {
    this.clearSpeedup();
    this.showSpread([]);
    for (const name of ["accepted", "tokens"]) this.set(name, "\u2013");
    for (const count of Object.values(this.counts)) count.textContent = "";
  }

  /** What both lanes are needed for. */
  clearSpeedup() {
    this.set("speedup", "\u2013");
    this.set("speedup-word", "speed-up");
    this.set("cost", "\u2013");
    delete this.root.dataset.won;
  }

  /** How far the speed-ups of the same run lie apart, where there are several. */
  showSpread(all) {
    const [least, most, middle] = [Math.min(...all), Math.max(...all), median(all)].map((value) => value?.toFixed(2));
    const spread = all.length + " runs: " + least + " to " + most + "\u00d7, median " + middle + "\u00d7";
    this.set("spread", all.length > 1 ? spread : RATIO);
    this.fields.spread.toggleAttribute("data-several", all.length > 1);
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
    const speedup = speculative.rate / plain.rate;
    this.set("speedup", speedup.toFixed(2) + "\u00d7");
    this.set("speedup-word", this.word(speedup));
    this.root.dataset.won = speedup >= 1;
    this.set("cost", (speculative.tokensPerRound / speedup).toFixed(2));
  }

  word(speedup) {
    const shown = Number(speedup.toFixed(2));
    return shown > 1 ? "faster" : shown < 1 ? "slower" : "no faster";
  }

  /** The numbers as a sentence, for those who hear the page. */
  sentence() {
    const { speedup, accepted, tokens } = this.fields;
    if (speedup.textContent === "\u2013") return "";
    return speedup.textContent.replace("\u00d7", " times the speed of plain decoding; ") +
      accepted.textContent + " accepted; " + tokens.textContent + " tokens per target pass.";
  }
}
