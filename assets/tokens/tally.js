/* Running totals of a lane. The definitions are those of core/records.py, whose own figures replace these at its end. */

export class Tally {
  constructor(run) {
    this.greedy = run.settings.temperature === 0;
    this.prefill = 0;
    this.seconds = 0;
    this.tokens = 0;
    this.rounds = 0;
    this.outcomes = { accepted: 0, rejected: 0, ignored: 0, corrected: 0, bonus: 0, plain: 0 };
    this.metrics = null;
  }

  add(round) {
    for (const token of round.drafted) this.outcomes[token.outcome] += 1;
    if (round.emitted) this.outcomes[round.emitted.outcome] += 1;
    const accepted = round.drafted.reduce((n, token) => n + (token.outcome === "accepted"), 0);
    this.tokens += accepted + (round.emitted ? 1 : 0);
    this.seconds += seconds(round);
    this.rounds += 1;
  }

  /** These totals and the outcomes that show while a round is on; what needs its time and its text waits for its end. */
  during(round, moment) {
    const seen = Object.assign(Object.create(Tally.prototype), this, { outcomes: { ...this.outcomes } });
    round.drafted.slice(0, moment.drafted).forEach((token, i) => {
      if (!moment.pending(i)) seen.outcomes[token.outcome] += 1;
    });
    return seen;
  }

  get elapsed() {
    return this.prefill + this.seconds;
  }

  get rate() {
    return this.metrics?.tokens_per_second ?? (this.seconds ? this.tokens / this.seconds : 0);
  }

  get acceptance() {
    if (this.metrics) return this.metrics.acceptance_rate;
    const judged = this.outcomes.accepted + this.outcomes.rejected;
    return judged ? this.outcomes.accepted / judged : null;
  }

  get tokensPerRound() {
    return this.metrics?.tokens_per_round ?? (this.rounds ? this.tokens / this.rounds : 0);
  }
}

/** Engine time of a round. */
export function seconds(round) {
  return round.draft_seconds + round.verify_seconds + round.other_seconds;
}
