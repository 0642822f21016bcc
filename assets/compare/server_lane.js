/* A lane that is a running server: text as it arrives, coloured only where the server tells what became of it. It is
   driven as LaneView (tokens/lanes.js) is, with chunks in place of rounds and the reader's clock in place of ours. */

const SHOWN_AT_ONCE = 0.05;

export class ServerLane {
  constructor(pane, label, curve) {
    this.pane = pane;
    this.label = label;
    this.curve = curve;
    this.tally = null;
    this.untold = pane.section.querySelector(".untold");
    this.clear();
  }

  clear() {
    this.run = null;
    this.pane.clear();
    this.untold.textContent = "";
  }

  open(run) {
    this.clear();
    this.run = { ...run, chunks: [] };
    this.spans = [];
    this.count = 0;
    this.drawn = -1;
    this.about = { ...run, environment: { target: { chat: true } } };
    this.pane.open(this.about);
  }

  add(chunk) {
    this.run.chunks.push(chunk);
    this.write(chunk);
    this.count += chunk.tokens ?? 1;
    if (this.run.chunks.length > 1 && chunk.seconds - this.drawn < SHOWN_AT_ONCE) return;
    this.drawn = chunk.seconds;
    this.curve.add(this.label, chunk.seconds, this.count);
  }

  write({ text, kind }) {
    this.spans.push(text ? this.pane.addText(text, kind) : null);
  }

  /** What the server told at the end: the colours too, where it tells them last, and where a pass's drafted text ends. */
  end(run) {
    Object.assign(this.run, run);
    if (run.chunks) {
      this.spans = [];
      this.pane.open(this.about);
      run.chunks.forEach((chunk) => this.write(chunk));
    }
    run.kinds.forEach((kind, i) => {
      if (kind && this.spans[i]) this.spans[i].dataset.kind = kind;
      this.run.chunks[i].kind = kind;
    });
    if (this.count) this.curve.add(this.label, this.run.chunks.at(-1).seconds, this.count);
    const { tokens, counted, tokens_per_second: rate, clock } = run.metrics;
    this.pane.end({ ...run, metrics: { new_tokens: tokens, seconds: run.seconds } });
    const [words, how] = this.pane.note.children;
    if (counted === "chunks") words.textContent = words.textContent.replace("tokens", "chunks");
    if (rate) how.textContent += ", " + (clock === "server" ? "the server\u2019s clock" : "the reader\u2019s clock");
    this.untold.textContent = run.missing.length ? "Not told by the server: " + run.missing.join(", ") + "." : "";
  }

  /** Draw an answer again that was drawn before. */
  show(run) {
    this.open(run);
    run.chunks.forEach((chunk) => this.add(chunk));
    if (run.metrics) this.end(run);
    this.run = run;
  }

  flush() {
    this.pane.flush();
    const chunks = this.run.chunks;
    const seconds = chunks.length > 1 ? chunks.at(-1).seconds - chunks[0].seconds : 0;
    const rate = this.run.metrics?.tokens_per_second ?? (seconds ? (this.count - (chunks[0].tokens ?? 1)) / seconds : 0);
    this.pane.progress(this.count, rate);
  }
}
