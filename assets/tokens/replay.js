/* A finished run once more, moment by moment: which of its tokens are there, and what is still pending. The elements of
   the finished run are only hidden and shown, so that leaving gives back exactly what was there. */

import { placesOf } from "./drawing.js";
import { Tally, seconds } from "./tally.js";
import { Moment, beatsOf, toldBeats } from "./story.js";

const LONGEST_FRAME = 0.1;
const READ_FOR = 0.6;
const THROUGH_SECONDS = 7;
const KEYS = "Space plays and pauses, \u2190 and \u2192 step, Esc leaves.";

export const READING = 0;

/** How many times slower a run goes so that each of its judgements can be read, to one digit. */
export function readingFactor(rounds) {
  const told = rounds.reduce((sum, round) => sum + toldBeats(round), 0);
  const checking = rounds.reduce((sum, round) => sum + seconds(round) - round.draft_seconds, 0);
  const factor = checking > 0 ? (READ_FOR * told) / checking : 1;
  const digit = 10 ** Math.floor(Math.log10(factor));
  return Math.max(1, Math.round(factor / digit) * digit);
}

/** An engine time as a person says it. */
function duration(time) {
  return time < 0.995 ? Number((1000 * time).toPrecision(3)) + " ms" : time.toFixed(2) + " s";
}

/** One lane in a replay: its rounds in engine time, from when the prompt was read, as tokens/s are counted; and its
 * tokens in the order in which they appear. */
class ReplayLane {
  constructor({ pane, run }) {
    this.pane = pane;
    this.run = run;
    this.rounds = run.rounds;
    this.ends = [];
    let end = 0;
    for (const round of this.rounds) this.ends.push((end += seconds(round)));
    this.spans = [...pane.tokens()];
    this.lines = new Map();
    let last = null;
    for (const span of this.spans) {
      const line = span.closest(".line");
      if (line !== last && !line.querySelector(".prompt")) this.lines.set(span, line);
      last = line;
    }
    this.counts = [0];
    for (const round of this.rounds) this.counts.push(this.counts.at(-1) + placesOf(round).length);
    this.shown = this.spans.length;
    this.waiting = [];
    this.opened = null;
    this.scrolled = pane.stream.scrollTop;
    this.followed = pane.following;
    this.noted = [...pane.note.childNodes];
    this.tally = new Tally(run);
  }

  start(index) {
    return index ? this.ends[index - 1] : 0;
  }

  /** How many rounds are over at a time. */
  overAt(time) {
    const found = this.ends.findIndex((end) => end > time + 1e-9);
    return found < 0 ? this.rounds.length : found;
  }

  /** Show the first `count` rounds, and of the next what has come of it at `moment`; `time` on the clock of all lanes.
   * With `opens`, what the round that is on has refused stays in sight until the next begins. */
  show(count, time, moment = null, opens = false) {
    const extra = moment ? moment.drafted + (moment.emitted ? 1 : 0) : 0;
    this.showTokens(this.counts[count] + extra);
    this.waiting.forEach((span) => span.classList.remove("pending"));
    this.waiting = moment ? this.spans.slice(this.counts[count], this.counts[count] + moment.drafted) : [];
    this.waiting = this.waiting.filter((_, i) => moment.pending(i));
    this.waiting.forEach((span) => span.classList.add("pending"));
    this.openFold(opens ? this.pane.folds.get(this.rounds[moment ? count : count - 1]) : null);
    this.sum(count);
    this.totals = moment ? this.tally.during(this.rounds[count], moment) : this.tally;
    this.pane.tell("at " + duration(time), "of engine time");
    if (!this.pane.held) this.pane.stream.scrollTop = this.pane.stream.scrollHeight;
  }

  showTokens(count) {
    const [low, high] = [Math.min(count, this.shown), Math.max(count, this.shown)];
    for (const span of this.spans.slice(low, high)) {
      span.classList.toggle("later", count < this.shown);
      if (span.previousElementSibling?.matches(".mark")) span.parentElement.classList.toggle("later", count < this.shown);
      this.lines.get(span)?.classList.toggle("later", count < this.shown);
    }
    this.shown = count;
  }

  openFold(fold) {
    if (fold === this.opened) return;
    this.opened?.classList.remove("open");
    fold?.classList.add("open");
    this.opened = fold;
  }

  /** Totals of the first `count` rounds. */
  sum(count) {
    if (count < this.tally.rounds) this.tally = new Tally(this.run);
    while (this.tally.rounds < count) this.tally.add(this.rounds[this.tally.rounds]);
  }

  leave() {
    this.showTokens(this.spans.length);
    this.openFold(null);
    this.waiting.forEach((span) => span.classList.remove("pending"));
    this.pane.note.replaceChildren(...this.noted);
    this.pane.following = this.followed;
    this.pane.stream.scrollTop = this.scrolled;
  }
}

/**
 * The place in a replay is `round` (of the leading lane: the speculative one where there is one), how many of its
 * `beats` have happened (`done`), and `time`, the engine time that both lanes are shown at.
 */
export class Replay {
  constructor(race) {
    this.race = race;
    this.lanes = null;
    this.speed = READING;
    this.playing = false;
    this.through = false;
    this.onchange = () => {};
  }

  get active() {
    return this.lanes !== null;
  }

  get leader() {
    return this.lanes.speculative ?? this.lanes.plain;
  }

  get leaderName() {
    return this.race.lanes.speculative.run ? "speculative" : "plain";
  }

  /** How many rounds there are to replay; none while a race is on. */
  get length() {
    return this.race.busy ? 0 : (this.race.lanes[this.leaderName].run?.rounds.length ?? 0);
  }

  enter() {
    if (this.active || !this.length) return;
    const { race } = this;
    race.card.hide();
    this.status = race.said;
    this.lanes = {};
    this.drawn = null;
    for (const [name, lane] of Object.entries(race.lanes)) if (lane.run) this.lanes[name] = new ReplayLane(lane);
    race.root.dataset.replay = this.through ? "through" : "";
    race.root.dispatchEvent(new Event("replay"));
    this.factor = readingFactor(this.leader.rounds);
    this.tell();
    this.place(0, 0);
  }

  /** Seconds of engine time that pass in a second of the replay. */
  get rate() {
    if (this.through) return Math.min(1, this.end / THROUGH_SECONDS);
    return this.speed === READING ? 1 / this.factor : this.speed;
  }

  setSpeed(speed) {
    this.speed = speed;
    if (this.active) this.tell();
  }

  /** How fast the one clock of the replay goes, by which both lanes are shown. */
  tell() {
    if (this.through) return;
    const { rate } = this;
    const times = Number((rate < 1 ? 1 / rate : rate).toPrecision(3)).toLocaleString("en");
    const both = Object.keys(this.lanes).length > 1;
    const pace = rate === 1 ? "as fast as" : times + " times " + (rate < 1 ? "slower than" : "faster than");
    const words = (both ? "Both lanes on one clock, " : "One lane, ") + pace + (both ? " they ran" : " it ran");
    this.race.say("replay", words + ": a second here is " + duration(rate) + " of the engine, once the prompt is read.", KEYS);
  }

  leave() {
    if (!this.active) return;
    this.pause();
    const { lanes, race } = this;
    this.lanes = null;
    this.through = false;
    delete race.root.dataset.replay;
    race.timeline.choose(null);
    for (const lane of Object.values(lanes)) lane.leave();
    race.say(...this.status);
    race.flush();
    race.inspector.refresh();
    this.onchange();
    race.root.dispatchEvent(new Event("replay"));
  }

  /** From beginning to end in a few seconds and in few words, until somebody asks for more. */
  playThrough() {
    this.leave();
    this.through = true;
    this.play();
  }

  /** Go to a round, after `done` of its beats (all of them where it is not given). */
  seek(round, done = Infinity) {
    if (this.through) this.leave();
    this.enter();
    if (!this.active) return;
    const at = Math.max(0, Math.min(this.leader.rounds.length - 1, round));
    this.place(at, Math.min(done, beatsOf(this.leader.rounds[at]).length));
    this.draw();
  }

  place(round, done) {
    this.round = round;
    this.beats = beatsOf(this.leader.rounds[round]);
    this.done = done;
    this.time = this.leader.start(round) + (done ? this.beats[done - 1].at : 0);
  }

  /** One moment on or back; false at the ends. */
  step(step) {
    if (this.through) this.leave();
    this.enter();
    const moved = this.active && this.move(step);
    if (this.active) this.draw();
    return moved;
  }

  move(step) {
    const next = this.done + step;
    if (next >= 0 && next <= this.beats.length && !(next === 0 && this.round > 0)) this.place(this.round, next);
    else if (step > 0 && this.leader.rounds[this.round + 1]) this.place(this.round + 1, 1);
    else if (step < 0 && this.round > 0) this.place(this.round - 1, beatsOf(this.leader.rounds[this.round - 1]).length);
    else return false;
    return true;
  }

  play() {
    this.enter();
    if (!this.active || this.playing) return;
    if (this.time >= this.end - 1e-9) this.place(0, 0);
    this.playing = true;
    this.onchange();
    let last = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      const passed = Math.max(0, Math.min(LONGEST_FRAME, (now - last) / 1000));
      last = now;
      this.advance(passed);
      const over = this.time >= this.end - 1e-9 && this.finished;
      if (over && this.through) return this.leave();
      if (over) this.pause();
      this.draw();
      if (this.playing) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  pause() {
    this.playing = false;
    this.onchange();
  }

  /** When the last lane ends. */
  get end() {
    return Math.max(...Object.values(this.lanes).map((lane) => lane.ends.at(-1) ?? 0));
  }

  get finished() {
    return this.round === this.leader.rounds.length - 1 && this.done === this.beats.length;
  }

  /** Let `passed` seconds of the replay go by. */
  advance(passed) {
    const time = Math.min(this.end, this.time + passed * this.rate);
    while (this.nextTime() <= time + 1e-9 && this.move(1));
    this.time = time;
  }

  nextTime() {
    const next = this.beats[this.done];
    if (next) return this.leader.start(this.round) + next.at;
    const after = this.leader.rounds[this.round + 1];
    return after ? this.leader.start(this.round + 1) + (beatsOf(after)[0]?.at ?? 0) : Infinity;
  }

  /** What has come of a round in what is shown now: all of it outside a replay. */
  momentOf(lane, round) {
    const whole = new Moment(round, Infinity);
    if (!this.active || this.lanes[lane] !== this.leader) return whole;
    return round === this.leader.rounds[this.round] ? new Moment(round, this.done, this.beats) : whole;
  }

  isLater(lane, index) {
    if (!this.active) return false;
    return this.lanes[lane] === this.leader ? index > this.round : index >= this.lanes[lane].overAt(this.time);
  }

  /** Show the place, where it is not what is shown already. */
  draw() {
    const { race, leader, lanes } = this;
    const key = [this.round, this.done, ...Object.values(lanes).map((lane) => lane.overAt(this.time))].join();
    if (key === this.drawn) return;
    this.drawn = key;
    const moment = new Moment(leader.rounds[this.round], this.done, this.beats);
    for (const lane of Object.values(lanes)) {
      if (lane === leader) lane.show(this.round + (moment.over ? 1 : 0), this.time, moment.over ? null : moment, !this.through);
      else lane.show(lane.overAt(this.time), this.time);
    }
    race.drawTallies(Object.fromEntries(Object.entries(lanes).map(([name, lane]) => [name, lane.totals])));
    race.timeline.choose(race.lanes.speculative.run ? this.round : null);
    this.follow(moment);
    this.onchange();
  }

  /** An open inspector looks at what happens. */
  follow(moment) {
    const { inspector } = this.race;
    if (!inspector.span || this.lanes[inspector.lane] !== this.leader) return;
    const first = this.leader.counts[this.round];
    const index = moment.beat?.index ?? 0;
    const span = this.leader.spans[first + (index < 0 ? this.leader.rounds[this.round].drafted.length : index)];
    if (!moment.beat) inspector.close();
    else if (span === inspector.span) inspector.refresh();
    else inspector.open(span, true);
  }
}
