"""How many tokens to draft next: a fixed number, or one chosen from measured costs and what was accepted so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.records import Round, depths
from core.settings import SPECS

Seconds = Callable[[int], float]
"""Time of one pass over n tokens."""


class Controller(Protocol):
    def next(self) -> int:
        """The draft length of the next round, decided before anything is drawn (that keeps it lossless)."""
        ...

    def observe(self, round_: Round) -> None: ...


class Fixed:
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self._length = SPECS["draft_length"].read(length)

    def next(self) -> int:
        return self._length

    def observe(self, round_: Round) -> None:
        pass


@dataclass
class Tally:
    """Discounted counts of how often a position was judged and accepted; starts with a prior."""

    accepted: float
    judged: float

    @property
    def rate(self) -> float:
        return self.accepted / self.judged

    def add(self, accepted: bool, memory: float) -> None:
        self.accepted = self.accepted * memory + accepted
        self.judged = self.judged * memory + 1


class Adaptive:
    """Before each round, the length that maximises expected tokens per second of the honest formula
    (`core.costs.formulas`).

    Acceptance is estimated by position from the outcomes so far, newer ones counting more; a position never reached is
    taken to be like all others together. 0 means a plain step. While plain is best, it probes with a single token:
    after 4, 8, 16 … plain steps as long as probing fails, and never so often that probing, with the draft's catching
    up, takes more than PROBING of the time. A pure function of costs and outcomes. `step`: seconds of a draft's pass
    over one token that follows another of its own; without it, draft(1).
    """

    PRIOR, PRIOR_WEIGHT, MEMORY = 0.7, 2.5, 0.96
    FIRST_PAUSE, LONGEST_PAUSE = 4, 64
    PROBING = 0.01

    def __init__(self, target: Seconds, draft: Seconds, step: float | None = None, longest: int = 16) -> None:
        self._target = [target(n) for n in range(1, longest + 2)]
        self._draft = draft
        self._step = draft(1) if step is None else step
        self._pooled = Tally(self.PRIOR * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT)
        self._by_position: list[Tally] = []
        self._behind = 0
        self._pause, self._since = self.FIRST_PAUSE, 0

    def next(self) -> int:
        if best := self._best():
            self._pause, self._since = self.FIRST_PAUSE, 0
            return best
        self._since += 1
        if self._since <= max(self._pause, self._probe_in_steps() / self.PROBING):
            return 0
        self._pause, self._since = min(2 * self._pause, self.LONGEST_PAUSE), 0
        return 1

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            self._behind += 1
            return
        for position, token in zip(depths(round_), round_.drafted):
            if token.outcome == "ignored":
                continue
            accepted = token.outcome == "accepted"
            while len(self._by_position) <= position:
                self._by_position.append(Tally(self._pooled.rate * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT))
            self._by_position[position].add(accepted, self.MEMORY)
            self._pooled.add(accepted, self.MEMORY)
        # After full acceptance the drafter has not fed its own last token.
        self._behind = int(all(token.outcome == "accepted" for token in round_.drafted))

    def _probe_in_steps(self) -> float:
        """What drafting and checking one token costs beyond a plain step, in plain steps."""
        return (self._draft(1 + self._behind) + self._target[1]) / self._target[0] - 1

    def _best(self) -> int:
        """The length with the most expected tokens per second; `_target[γ]` is a pass over γ + 1 tokens."""
        best, most = 0, 1 / self._target[0]
        expected, reached = 1.0, 1.0
        drafting = self._draft(1 + self._behind)
        for gamma in range(1, len(self._target)):
            known = self._by_position[gamma - 1 : gamma]
            reached *= (known[0] if known else self._pooled).rate
            expected += reached
            rate = expected / (drafting + self._target[gamma])
            if rate > most:
                best, most = gamma, rate
            drafting += self._step
        return best
