/* The four numbers between the panes, and the count of each outcome. */

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
    this.set("speedup", "\u2013");
    this.set("speedup-word", "speed-up");
    for (const name of ["accepted", "tokens", "cost"]) this.set(name, "\u2013");
    for (const count of Object.values(this.counts)) count.textContent = "";
    delete this.root.dataset.won;
  }

  set(name, text) {
    if (this.fields[name].textContent !== text) this.fields[name].textContent = text;
  }

  draw(speculative, plain) {
    if (!speculative) return;
    for (const [kind, count] of Object.entries(this.counts)) count.textContent = speculative.outcomes[kind];
    const acceptance = speculative.acceptance;
    this.set("accepted", acceptance == null ? "\u2013" : Math.round(100 * acceptance) + "\u2009%");
    if (speculative.rounds) this.set("tokens", speculative.tokensPerRound.toFixed(2));
    if (!plain?.tokens || !speculative.tokens) return;
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
