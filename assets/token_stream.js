/* The race component: reads events from the growing value, line by line, and draws each once. */

const EMPTY =
  "Press Run: a small draft model proposes the next few tokens, the target checks them all in one pass, and beside it the " +
  "same target writes alone. Same text, less time.";

class Race {
  constructor(root) {
    this.root = root;
    this.panes = {};
    for (const section of root.querySelectorAll(".pane")) this.panes[section.dataset.lane] = new Pane(section);
    this.status = root.querySelector(".status");
    this.announce = root.querySelector(".announce");
    this.numbers = new Numbers(root);
    this.curve = new Curve(root.querySelector('[data-chart="curve"] svg'));
    const timeline = root.querySelector('[data-chart="timeline"]');
    this.timeline = new Timeline(timeline.querySelector("svg"), timeline.querySelector(".timeline-note"));
    this.card = new Card(root.querySelector(".card"));
    this.head = "";
    this.over = new Set();
    this.documents = {};
    this.tallies = {};
    this.pending = false;
    this.say("idle", EMPTY);
    const legend = [...root.querySelectorAll(".legend li")];
    const key = legend.map((item) => ({ kind: item.firstElementChild.dataset.kind, meaning: item.title }));
    this.panes.speculative.hint("Every token says what became of it:", key);
    this.panes.plain.hint("The same target, one token per pass, on the same clock.");
  }

  get busy() {
    return this.root.dataset.state === "busy";
  }

  set busy(busy) {
    this.root.dataset.state = busy ? "busy" : "idle";
    document.documentElement.dataset.race = this.root.dataset.state;
  }

  say(kind, text, why = "") {
    this.status.dataset.kind = kind;
    this.status.setAttribute("role", kind === "error" ? "alert" : "status");
    this.status.querySelector(".status-text").textContent = text;
    this.status.querySelector(".status-why").textContent = why;
  }

  /** Read what is new in the value: the lines past those read, or all of them where it is another run's. */
  update(value) {
    if (!value) return;
    if (!this.head || !value.startsWith(this.head)) {
      if (!this.newWindow(value)) return;
    }
    const lines = value.slice(this.read).split("\n");
    this.read = value.length;
    for (const line of lines) {
      if (!line) continue;
      if (this.skip > 0) this.skip -= 1;
      else this.take(JSON.parse(line));
    }
    this.flush();
  }

  /** The value began anew: with the last lines of the same run, with another run, or late with one that is over. */
  newWindow(value) {
    const head = value.slice(0, value.indexOf("\n") + 1);
    const { id, from } = JSON.parse(head);
    if (this.over.has(id)) return false;
    this.head = head;
    this.read = head.length;
    if (id !== this.id) {
      if (this.id) this.over.add(this.id);
      this.id = id;
      this.seen = 0;
      this.begin();
    }
    this.skip = this.seen - from;
    if (this.skip < 0) this.say("error", "Part of this run was lost on the way to the browser; please run it again.");
    return true;
  }

  take(event) {
    this.seen += 1;
    if (event.e === "status") this.say(event.kind, event.text);
    else if (event.e === "open") this.open(event.lane, event.run);
    else if (event.e === "round") this.addRound(event);
    else if (event.e === "end") this.endLane(event.lane, event.run);
    else if (event.e === "verdict") this.verdict(event);
    else if (event.e === "error") this.say("error", event.text);
    else if (event.e === "done") this.done();
  }

  begin() {
    this.card.hide();
    this.busy = true;
    this.documents = {};
    this.tallies = {};
  }

  /** The lanes of a new run replace those of the last one only once there is something to show. */
  open(lane, run) {
    if (!Object.keys(this.documents).length) {
      Object.values(this.panes).forEach((pane) => pane.clear());
      this.numbers.clear();
      this.curve.clear();
      this.timeline.clear();
      this.panes.speculative.hint("Speculation is off.");
    }
    this.documents[lane] = { ...run, rounds: [] };
    this.tallies[lane] = new Tally(run);
    this.panes[lane].open(run);
  }

  addRound({ lane, round, prefill }) {
    const tally = this.tallies[lane];
    if (prefill !== undefined) {
      tally.prefill = prefill;
      this.say("running", "Racing: the lanes share the device, each on its own clock.");
    }
    if (lane === "plain") this.timeline.addStep(tally.elapsed, round);
    else this.timeline.addRound(tally.elapsed, round);
    tally.add(round);
    this.documents[lane].rounds.push(round);
    this.panes[lane].add(round);
    this.curve.add(lane, tally.elapsed, tally.tokens, tally.prefill);
  }

  endLane(lane, run) {
    Object.assign(this.documents[lane], run);
    this.tallies[lane].metrics = run.metrics;
    this.panes[lane].end(run);
  }

  verdict({ kind, text, why }) {
    this.say(kind, text, why ?? "");
    this.flush();
    this.announce.textContent = this.numbers.sentence();
  }

  done() {
    this.busy = false;
    if (!this.pending) return;
    this.pending = false;
    setTimeout(() => document.querySelector("#run")?.click(), 0);
  }

  flush() {
    for (const [lane, tally] of Object.entries(this.tallies)) {
      this.panes[lane].flush();
      this.panes[lane].progress(tally.tokens, tally.rate);
    }
    this.numbers.draw(this.tallies.speculative, this.tallies.plain);
    this.drawCharts();
  }

  drawCharts() {
    this.curve.draw();
    this.timeline.draw();
  }

  /** The output alone, as the run document has it. */
  text() {
    const lane = this.documents.speculative ? "speculative" : "plain";
    return this.documents[lane]?.text ?? this.panes[lane].text;
  }
}

/** Hover, focus and arrow keys lead to the card of a token; the text under the pointer stands still meanwhile. */
function connectCard(race) {
  const { root, card } = race;
  const token = (event) => event.target.closest?.(".t");
  const paneOf = (span) => race.panes[span.closest(".pane").dataset.lane];
  const show = (span) => card.show(span, race.tallies[span.closest(".pane").dataset.lane]?.greedy ?? true);

  for (const pane of Object.values(race.panes)) {
    pane.stream.addEventListener("pointerenter", () => (pane.held = true));
    pane.stream.addEventListener("pointerleave", () => {
      pane.held = false;
      card.hide();
    });
    pane.stream.addEventListener("scroll", () => card.follow(pane.stream), { passive: true });
  }
  root.addEventListener("pointerover", (event) => token(event) && show(token(event)));
  root.addEventListener("pointerdown", (event) => token(event) && paneOf(token(event)).entry(token(event)));
  root.addEventListener("focusin", (event) => token(event) && show(token(event)));
  root.addEventListener("focusout", () => card.hide());
  document.addEventListener("scroll", () => card.follow(document.documentElement), { passive: true });
  root.addEventListener("keydown", (event) => {
    const span = token(event);
    if (!span || !/^(Arrow|Home$|End$)/.test(event.key) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = paneOf(span).neighbour(span, event.key);
    if (!next) return;
    paneOf(span).entry(next);
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  });
}

/** Run, Stop, their keys, and a run that was asked for while another is going. */
function connectButtons(race) {
  let sent = 0;

  document.addEventListener("click", (event) => {
    if (event.target.closest?.("#run")) onRun(event);
    else if (event.target.closest?.("#stop")) onStop();
  }, true);
  document.addEventListener("race-over", () => {
    sent -= 1;
    if (sent > 0 || !race.busy) return;
    if (race.status.dataset.kind === "starting") race.say("idle", EMPTY);
    race.done();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      document.querySelector("#run")?.click();
    } else if (event.key === "Escape") {
      if (race.card.span) race.card.hide();
      else if (race.busy) document.querySelector("#stop")?.click();
    }
  });

  function onRun(event) {
    if (!race.busy) {
      sent += 1;
      race.busy = true;
      race.say("starting", "Starting\u2026");
      return;
    }
    event.stopImmediatePropagation();
    event.preventDefault();
    race.pending = true;
    race.say("queued", "Queued: your next run starts when this one ends. Stop cancels both.");
  }

  function onStop() {
    race.pending = false;
    if (race.busy) race.say("stopping", "Stopping\u2026");
  }
}

function connectTools(race) {
  const hide = race.root.querySelector("#hide-struck");
  hide.addEventListener("click", () => {
    const hidden = hide.getAttribute("aria-pressed") !== "true";
    hide.setAttribute("aria-pressed", String(hidden));
    race.root.toggleAttribute("data-hide-struck", hidden);
  });
  const copy = race.root.querySelector("#copy-text");
  copy.addEventListener("click", async () => {
    await copyText(race.text());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy text"), 1200);
  });
  race.root.addEventListener("copy", (event) => {
    const text = selectedOutput(race);
    if (text === null) return;
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });
}

/** Where there is no clipboard (a page that is not on this machine, without https), the old way. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", "announce", text);
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** The kept tokens of a selection, as the model wrote them; null where it holds none. */
function selectedOutput(race) {
  const selection = document.getSelection();
  const chosen = [...race.root.querySelectorAll(".stream .t")].filter((span) => selection.containsNode(span, true));
  if (!chosen.length) return null;
  return chosen.filter((span) => KEPT.has(span.token.outcome)).map((span) => span.token.text).join("");
}

const race = new Race(element.querySelector(".race"));
connectCard(race);
connectButtons(race);
connectTools(race);
new ResizeObserver(() => race.drawCharts()).observe(race.root.querySelector(".charts"));
race.root.race = race;
watch("value", () => race.update(props.value));
race.update(props.value);
