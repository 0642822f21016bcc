"""How many tokens to draft next: a fixed number, or one chosen from measured costs and what was accepted so far.

Every choice is made before anything is drawn, from the past and the text alone: that keeps it lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.costs.rounds import RoundCosts, missed
from core.records import Round, Source, depths
from core.settings import SPECS


class Controller(Protocol):
    def next(self, context: list[int]) -> int:
        """The draft length of the next round, after the committed ids; 0 for a plain step."""
        ...

    def observe(self, round_: Round) -> None: ...


class Growing:
    """A controller whose choice moves with the text: what its rounds cost (`refit`) is measured again wherever the text
    has doubled, from `START` tokens on and up to `limit`. Measuring is on no round's clock."""

    START = 512

    def __init__(
        self,
        controller: Controller,
        refit: Sequence[Callable[[RoundCosts], None]],
        costs: Callable[[], RoundCosts],
        limit: int,
    ) -> None:
        self._controller, self._refit, self._costs = controller, refit, costs
        self._due, self._limit = self.START, limit

    def settle(self, held: int) -> None:
        """Before a round, the target's cache holding so many tokens."""
        if self._due <= held <= self._limit:
            costs = self._costs()
            for refit in self._refit:
                refit(costs)
            self._due = 2 * held

    def next(self, context: list[int]) -> int:
        return self._controller.next(context)

    def observe(self, round_: Round) -> None:
        self._controller.observe(round_)


class Fixed:
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self._length = SPECS["draft_length"].read(length)

    def next(self, context: list[int]) -> int:
        return self._length

    def observe(self, round_: Round) -> None:
        pass


class Recorded:
    """The draft lengths of a run's rounds once more, with the shapes of its trees and who drafted where two take
    turns: what repeats the run."""

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._rounds = iter(rounds)
        self._round = Round(-1)

    def next(self, context: list[int]) -> int:
        self._round = next(self._rounds)
        return self._round.draft_length or 0

    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, (self._round.tree or "1").split("x")))

    def nodes(self) -> int:
        return len(self._round.drafted)

    def source(self) -> Source:
        return self._round.source or "model"

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


class Acceptance:
    """How often a drafter's tokens stand, by position, newer outcomes counting more; a position never reached is taken
    to be like all others together."""

    PRIOR, PRIOR_WEIGHT, MEMORY = 0.7, 2.5, 0.96

    def __init__(self, prior: float = PRIOR) -> None:
        self._pooled = Tally(prior * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT)
        self._by_position: list[Tally] = []

    def add(self, position: int, accepted: bool) -> None:
        while len(self._by_position) <= position:
            self._by_position.append(Tally(self._pooled.rate * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT))
        self._by_position[position].add(accepted, self.MEMORY)
        self._pooled.add(accepted, self.MEMORY)

    def rates(self, count: int) -> list[float]:
        """Of each position, given that those before it stand; [count]."""
        known = [tally.rate for tally in self._by_position[:count]]
        return known + [self._pooled.rate] * (count - len(known))


class Probing:
    """When to try a single token while plain is best: after 4, 8, 16 … plain steps as long as that fails, and never so
    often that it takes more than SHARE of the time."""

    FIRST_PAUSE, LONGEST_PAUSE = 4, 64
    SHARE = 0.01

    def __init__(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Drafting is best again."""
        self._pause, self._since = self.FIRST_PAUSE, 0

    def due(self, extra: float) -> bool:
        """After one more plain step; `extra`: what a probe takes beyond a plain step, in plain steps."""
        self._since += 1
        if self._since <= max(self._pause, extra / self.SHARE):
            return False
        self._pause, self._since = min(2 * self._pause, self.LONGEST_PAUSE), 0
        return True


class Adaptive:
    """Before each round, the length that maximises expected tokens per second by `RoundCosts`. 0 means a plain step;
    while that is best, it probes with a single token. A pure function of costs, outcomes and `prior`, the acceptance
    rate to start from."""

    def __init__(self, costs: RoundCosts, longest: int = 16, prior: float = Acceptance.PRIOR) -> None:
        self._longest = longest
        self.refit(costs)
        self.acceptance = Acceptance(prior)
        self._behind = 0
        self._probing = Probing()

    def refit(self, costs: RoundCosts) -> None:
        """Rounds cost something else from now on."""
        self._costs = costs
        # Choosing is on the clock of every round: what does not change is summed once.
        self._seconds = [costs.chain(length) for length in range(self._longest + 1)]

    def next(self, context: list[int]) -> int:
        length, _ = self.best()
        if length:
            self._probing.rest()
            return length
        plain = self._costs.plain
        return int(self._probing.due(self._costs.chain(1, self._behind) / plain - 1))

    def best(self, most: int | None = None) -> tuple[int, float]:
        """The length, of at most `most`, with the most expected tokens per second, and how many that are."""
        best, highest = 0, 1 / self._seconds[0]
        late = self._costs.late(self._behind)
        expected = reached = 1.0
        seconds = self._seconds[1 : None if most is None else most + 1]
        for length, (rate, spent) in enumerate(zip(self.acceptance.rates(len(seconds)), seconds), 1):
            reached *= rate
            expected += reached
            if expected > highest * (spent + late):
                best, highest = length, expected / (spent + late)
        return best, highest

    def observe(self, round_: Round) -> None:
        for position, token in zip(depths(round_), round_.drafted):
            if token.outcome != "ignored":
                self.acceptance.add(position, token.outcome == "accepted")
        self._behind = missed(round_, self._behind)

    def pass_over(self, round_: Round) -> None:
        """A round in which another drafter drafted, or nobody."""
        self._behind = missed(round_, self._behind, drafted=False)


class AdaptiveSource:
    """Which of two drafters drafts next, and how much: an n-gram where the text repeats itself, else a model. Each has
    an acceptance and costs of its own.

    What an n-gram would have proposed is held against every text that follows, whoever drafted it: under any law of
    the target, a token equals a proposal as often as the proposal would have been accepted.
    """

    def __init__(self, find: Callable[[list[int], int], Sequence[int]], ngram: Adaptive, model: Adaptive) -> None:
        self._find = find
        self._ngram, self._model = ngram, model
        self._found: Sequence[int] = ()
        self._source: Source = "model"

    def source(self) -> Source:
        return self._source

    def refit(self, costs: RoundCosts) -> None:
        self._ngram.refit(RoundCosts(costs.target, overhead=costs.overhead))
        self._model.refit(costs)

    def next(self, context: list[int]) -> int:
        self._found = self._find(context, 16)
        length, rate = self._ngram.best(len(self._found))
        if length and rate > self._model.best()[1]:
            self._source = "ngram"
            return length
        self._source = "model"
        return self._model.next(context)

    def observe(self, round_: Round) -> None:
        for position, (guess, token) in enumerate(zip(self._found, round_.kept)):
            self._ngram.acceptance.add(position, guess == token.id)
            if guess != token.id:
                break
        if self._source == "model":
            self._model.observe(round_)
        else:
            self._model.pass_over(round_)
