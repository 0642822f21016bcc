/* The controls of a replay, and the stage: the round that is on, as it stands, with a sentence for each moment. */

import { fitTree, roundDrawing } from "./drawing.js";
import { scale, timesOf } from "./inspector.js";
import { READING } from "./replay.js";
import { acceptance, beatWords, laterSibling, phaseOf } from "./story.js";

const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class Scrubber {
  constructor(race) {
    this.race = race;
    this.replay = race.replay;
    const { root } = race;
    this.box = root.querySelector(".scrubber");
    this.slider = this.box.querySelector("input");
    this.label = this.box.querySelector(".scrubber-round");
    this.speed = this.box.querySelector("select");
    this.stage = root.querySelector(".stage");
    this.phases = [...root.querySelectorAll(".stage-phases [data-phase]")];
    this.title = root.querySelector(".stage-title");
    this.words = root.querySelector(".stage-words");
    this.buttons = {};
    for (const button of this.box.querySelectorAll("[data-do]")) {
      this.buttons[button.dataset.do] = button;
      button.addEventListener("click", () => this.do(button.dataset.do));
    }
    this.slider.addEventListener("input", () => this.goTo(Number(this.slider.value) - 1));
    this.speed.addEventListener("change", () => this.replay.setSpeed(Number(this.speed.value)));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.replay.onchange = () => this.draw();
    STILL.addEventListener("change", () => this.draw());
    root.addEventListener("inspected", () => this.draw());
    this.draw();
  }

  do(what) {
    const { replay } = this;
    if (what === "play") return replay.playing ? replay.pause() : this.play();
    replay.pause();
    if (what === "leave") this.leave();
    else if (what === "on") replay.step(1);
    else if (replay.active) replay.step(-1);
    else replay.seek(replay.length - 1);
  }

  play() {
    if (!STILL.matches) this.replay.play();
  }

  /** From the beginning, slow enough to be read. */
  watch() {
    this.race.stopExample();
    this.speed.value = READING;
    this.replay.setSpeed(READING);
    this.replay.pause();
    this.replay.seek(0, 0);
    this.play();
    this.buttons.play.focus({ preventScroll: true }); // where Space pauses
    this.stage.parentElement.scrollIntoView({ block: "nearest" });
  }

  leave() {
    const inside = this.box.contains(document.activeElement);
    this.replay.leave();
    if (inside) this.buttons.play.focus({ preventScroll: true });
  }

  goTo(round) {
    this.replay.pause();
    this.replay.seek(round);
  }

  /** Space plays; arrows step, or on the slider go by rounds as on any slider. */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === this.speed) return;
    const { replay } = this;
    const now = replay.active ? replay.round : replay.length - 1;
    const onSlider = event.target === this.slider;
    const uses = {
      ArrowLeft: () => (onSlider ? this.goTo(now - 1) : this.do("back")),
      ArrowRight: () => (onSlider ? this.goTo(now + 1) : this.do("on")),
      ArrowDown: () => this.goTo(now - 1),
      ArrowUp: () => this.goTo(now + 1),
      PageUp: () => this.goTo(now + 1),
      PageDown: () => this.goTo(now - 1),
      Home: () => this.goTo(0),
      End: () => this.goTo(replay.length - 1),
      " ": () => this.do("play"),
    };
    const onButton = event.target.closest("button") && event.key === " ";
    if (!uses[event.key] || onButton || !replay.length) return;
    event.preventDefault();
    uses[event.key]();
  }

  draw() {
    const { replay } = this;
    const { active, length, playing } = replay;
    const round = active ? replay.round + 1 : this.looked || length;
    this.slider.max = length;
    this.slider.min = Math.min(1, length);
    this.slider.value = round;
    this.slider.setAttribute("aria-valuetext", "round " + round + " of " + length);
    this.label.textContent = length ? "round " + round + " / " + length : "no rounds";
    this.enable(length > 0, active);
    this.box.toggleAttribute("data-playing", playing);
    this.buttons.play.setAttribute("aria-label", playing ? "Pause" : "Play");
    if (active && !replay.through) this.drawStage();
  }

  /** Of the finished run, the number of the round that is looked at, so that one number is told of it. */
  get looked() {
    const { inspector, documents } = this.race;
    if (!inspector.span || inspector.lane !== "speculative") return 0;
    return documents.speculative.rounds.indexOf(inspector.span.round) + 1;
  }

  enable(any, active) {
    for (const control of [this.slider, this.speed, ...Object.values(this.buttons)]) control.disabled = !any;
    this.buttons.leave.disabled = !active;
    if (STILL.matches) {
      this.buttons.play.disabled = this.speed.disabled = true;
      this.buttons.play.title = "Your system asks for less motion: step through the run instead";
    }
  }

  drawStage() {
    const { replay, race } = this;
    const lane = replay.leaderName;
    const round = replay.leader.rounds[replay.round];
    const moment = replay.momentOf(lane, round);
    this.title.textContent = "Round " + (replay.round + 1);
    this.words.setAttribute("aria-live", replay.playing ? "off" : "polite");
    this.words.textContent = beatWords(round, moment.beat, race.lanes[lane].tally.greedy);
    const phase = phaseOf(round, moment.beat);
    for (const each of this.phases) each.toggleAttribute("data-on", each.dataset.phase === phase);
    const drawing = roundDrawing(round, moment, moment.beat?.index ?? null, null);
    this.stage.classList.toggle("of-tree", Boolean(drawing.querySelector("svg")));
    this.stage.replaceChildren(drawing, ...this.test(round, moment.beat));
    this.fit(drawing);
  }

  /** The number drawn, where the p and q that are recorded are those of the test. */
  test(round, beat) {
    const { greedy } = this.race.lanes[this.replay.leaderName].tally;
    if (greedy || beat?.kind !== "judge" || laterSibling(round, beat.index)) return [];
    const token = round.drafted[beat.index];
    return token.draw == null ? [] : [scale(acceptance(token), token.draw)];
  }

  fit(drawing) {
    fitTree(drawing, drawing.clientWidth, this.stage.clientHeight);
    this.keepInside(drawing.querySelector('.tree-node[aria-current="true"]'));
  }

  /** Scroll the stage alone, never the page. */
  keepInside(node) {
    if (!node) return;
    const [at, room] = [node.getBoundingClientRect(), this.stage.getBoundingClientRect()];
    this.stage.scrollTop += Math.max(0, at.bottom - room.bottom) + Math.min(0, at.top - room.top);
    this.stage.scrollLeft += Math.max(0, at.right - room.right) + Math.min(0, at.left - room.left);
  }
}

/** The timeline chooses rounds: by pointer, and by arrow keys with Enter. */
export function connectTimeline(race) {
  const { timeline, replay, inspector } = race;
  const { slider } = timeline;
  const rounds = () => timeline.rounds;

  function choose(index) {
    if (!rounds()[index]) return;
    if (replay.active) replay.pause();
    if (replay.active) replay.seek(index);
    else if (inspector.span) inspector.openRound("speculative", rounds()[index].round);
    else timeline.choose(index);
  }

  function inspect(index) {
    if (replay.active) return choose(index);
    inspector.openRound("speculative", rounds()[index]?.round);
  }

  slider.addEventListener("click", (event) => {
    const index = timeline.roundAt(event.clientX);
    if (index !== null) inspect(index);
  });
  slider.addEventListener("pointermove", (event) => {
    const index = timeline.roundAt(event.clientX);
    if (index !== null) timeline.say("round " + (index + 1) + ": " + timesOf(rounds()[index].round, inspector.plainStep()));
  });
  slider.addEventListener("pointerleave", () => timeline.draw());
  slider.addEventListener("keydown", (event) => {
    const now = timeline.chosen ?? rounds().length - 1;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
    const last = rounds().length - 1;
    let next = steps[event.key] && Math.max(0, Math.min(last, now + steps[event.key]));
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    const enter = event.key === "Enter" && !event.ctrlKey && !event.metaKey;
    if (next === undefined && !enter) return;
    event.preventDefault();
    if (enter) inspect(now);
    else choose(next);
  });
  race.root.addEventListener("inspected", () => {
    if (replay.active) return;
    const seen = inspector.span && inspector.lane === "speculative" ? inspector.span.round : null;
    timeline.choose(seen && rounds().findIndex((each) => each.round === seen));
  });
}
