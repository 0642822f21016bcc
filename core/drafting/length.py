"""How many tokens to draft next: a fixed number, or one chosen from measured costs and what was accepted so far.

Every choice is made before anything is drawn, from the past and the text alone: that keeps it lossless.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.costs.rounds import RoundCosts
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
        if self._round.ended in ("unsure", "odds"):
            return len(self._round.drafted)
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

    def add(self, accepted: float, memory: float) -> None:
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
    often that it takes more than SHARE of the time: not at all where that is what catching up on each takes."""

    FIRST_PAUSE, LONGEST_PAUSE = 4, 64
    SHARE = 0.02

    def __init__(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Drafting is best again."""
        self._pause, self._since = self.FIRST_PAUSE, 0

    def due(self, costs: RoundCosts, behind: int) -> bool:
        """After one more plain step, the drafter being so late: of a round that drafts one token, what is beyond a
        plain step counts."""
        self._since += 1
        if self._since <= self._pause or self._since * self.SHARE <= costs.chain(1, behind) / costs.plain - 1:
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
        return int(self._probing.due(self._costs, self._behind))

    def rates(self) -> list[float]:
        """How often each token of a draft is expected to stand if those before it do."""
        return self.acceptance.rates(self._longest)

    def best(self) -> tuple[int, float]:
        """The length with the most expected tokens per second, and how many that are."""
        best, highest = 0, 1 / self._seconds[0]
        late = self._costs.late(self._behind)
        expected = reached = 1.0
        for length, (rate, spent) in enumerate(zip(self.rates(), self._seconds[1:]), 1):
            reached *= rate
            expected += reached
            if expected > highest * (spent + late):
                best, highest = length, expected / (spent + late)
        return best, highest

    def observe(self, round_: Round) -> None:
        for position, token in zip(depths(round_), round_.drafted):
            if token.outcome != "ignored":
                self.acceptance.add(position, token.outcome == "accepted")
        self._behind = self._costs.missed(round_, self._behind)

    def pass_over(self, round_: Round) -> None:
        """A round in which another drafter drafted, or nobody."""
        self._behind = self._costs.missed(round_, self._behind, drafted=False)


class Worth:
    """How often a drafter's tokens stand, by its highest probability before they were drawn, and how often it is how
    sure; newer outcomes count more. Both begin with what trained heads and small models have shown, `prior` being how
    often this one's tokens are expected to stand.

    What is learnt of one degree of being sure is expected of the others: whether more or fewer stand than usual."""

    BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.95)
    STOOD = (0.12, 0.3, 0.5, 0.7, 0.88, 0.985)
    SHARES = (0.06, 0.14, 0.16, 0.14, 0.15, 0.35)
    WEIGHT, MEMORY = 8.0, 0.97
    FORGETS = 0.98

    def __init__(self, prior: float = Acceptance.PRIOR) -> None:
        usual = sum(stood * share for stood, share in zip(self.STOOD, self.SHARES))
        self._all, self._usual = Tally(prior * self.WEIGHT, self.WEIGHT), Tally(usual * self.WEIGHT, self.WEIGHT)
        self._tallies = [Tally(0.0, 0.0) for _ in self.STOOD]
        self._seen = [share * self.WEIGHT for share in self.SHARES]
        self._settle()

    def rate(self, confidence: float) -> float:
        """The chance that a token stands if those before it do."""
        return self._rates[bisect_right(self.BOUNDS, confidence)]

    def outlook(self) -> list[tuple[float, float]]:
        """What may come next: chances, with the rate in each case."""
        whole = sum(self._seen)
        return [(seen / whole, rate) for seen, rate in zip(self._seen, self._rates)]

    def see(self, confidence: float) -> None:
        self._seen = [seen * self.FORGETS for seen in self._seen]
        self._seen[bisect_right(self.BOUNDS, confidence)] += 1

    def add(self, confidence: float, accepted: bool) -> None:
        of = bisect_right(self.BOUNDS, confidence)
        self._tallies[of].add(accepted, self.MEMORY)
        self._all.add(accepted, self.MEMORY)
        self._usual.add(self.STOOD[of], self.MEMORY)
        self._settle()

    def _settle(self) -> None:
        found, usual = self._all.rate, self._usual.rate
        good, bad = min(found / usual, 1.0), min((1 - found) / (1 - usual), 1.0)
        expected = [1 - (1 - good * stood) * bad for stood in self.STOOD]
        self._rates = [
            (tally.accepted + rate * self.WEIGHT) / (tally.judged + self.WEIGHT)
            for tally, rate in zip(self._tallies, expected)
        ]


class Confident(Adaptive):
    """Ends each draft where going on is worth less than it costs (an `Ending`, core/drafting/chain.py).

    A token is worth drafting if the chance that it stands, with all before it, exceeds what the tokens per second so
    far would bring in the time that a checked row takes. Another pass is worth running if, over how sure the drafter
    may turn out to be, what such tokens would bring in excess of that exceeds the pass's own time at that rate. Both
    are known before the token in question is drawn.
    """

    MEMORY, ROUNDS = 0.95, 6.0

    def __init__(self, costs: RoundCosts, longest: int = 16, prior: float = Acceptance.PRIOR) -> None:
        super().__init__(costs, longest, prior)
        self._worth = Worth(prior)
        self._spent = self.ROUNDS / super().best()[1]
        self._written = self.ROUNDS
        self._probe = False
        self._open = True
        """Whether drafting may pay: not where it did not at the speed of plain decoding, and nothing was drafted since.
        """
        self.begin()

    def refit(self, costs: RoundCosts) -> None:
        super().refit(costs)
        self._rows = [costs.checked(n + 1) - costs.checked(n) for n in range(self._longest + 1)]

    @property
    def rate(self) -> float:
        """Tokens per second of late, by what rounds cost; no less than plain decoding has."""
        return max(self._written / self._spent, 1 / self._costs.plain)

    def begin(self) -> None:
        self._taken, self._chance = 0, 1.0
        self._rate, self._outlook = self.rate, self._worth.outlook()

    def takes(self, confidence: float) -> bool:
        chance = self._chance * self._worth.rate(confidence)
        if chance <= self._rate * self._rows[self._taken] and not self._probe:
            return False
        self._taken, self._chance = self._taken + 1, chance
        return True

    def goes_on(self) -> bool:
        return self._pays(self._costs.step)

    def next(self, context: list[int]) -> int:
        self._probe = False
        if self._open:  # choosing is on the clock of plain steps, too
            self.begin()
            if self._pays(self._costs.draft(1) + self._costs.late(self._behind)):
                self._probing.rest()
                return self._longest
            self._open = self._rate * self._costs.plain > 1 + Probing.SHARE
        self._probe = self._probing.due(self._costs, self._behind)
        return int(self._probe)

    def best(self) -> tuple[int, float]:
        return self._longest, self.rate

    def observe(self, round_: Round) -> None:
        looked = round_.refused is not None
        self._open = self._open or looked or bool(round_.drafted)
        seconds = self._costs.chain(len(round_.drafted), self._behind, looked)
        self._written = self._written * self.MEMORY + len(round_.kept)
        self._spent = self._spent * self.MEMORY + seconds
        super().observe(round_)
        for token in round_.drafted:
            if token.confidence is not None:
                self._worth.see(token.confidence)
                if token.outcome != "ignored":
                    self._worth.add(token.confidence, token.outcome == "accepted")
        if round_.refused is not None:
            self._worth.see(round_.refused)

    def _pays(self, seconds: float) -> bool:
        """Whether a pass of the drafter so long is worth it, by what may come of it."""
        row = self._rate * self._rows[self._taken]
        gain = sum(share * max(0.0, self._chance * stands - row) for share, stands in self._outlook)
        return gain > self._rate * (seconds + self._costs.drawing)


Match = Callable[[list[int], int], tuple[Sequence[int], int]]
"""Up to so many ids that followed the same words last time, and how many words those were."""


class Matches:
    """How often a token that followed the same words last time follows them again, by how many words before it are the
    same; newer outcomes count more. It begins with what chats have shown."""

    SHORTEST = 2
    STOOD = (0.5, 0.56, 0.62, 0.68, 0.72, 0.8, 0.92)
    WEIGHT, MEMORY = 8.0, 0.97

    def __init__(self) -> None:
        self._tallies = [Tally(rate * self.WEIGHT, self.WEIGHT) for rate in self.STOOD]

    def rates(self, same: int, count: int) -> list[float]:
        """Of `count` tokens in a row behind so many words, given that those before them stand."""
        return [self._of(same + i).rate for i in range(count)]

    def add(self, same: int, accepted: bool) -> None:
        self._of(same).add(accepted, self.MEMORY)

    def _of(self, same: int) -> Tally:
        return self._tallies[min(max(same - self.SHORTEST, 0), len(self._tallies) - 1)]


class Repeating(Adaptive):
    """As much of what followed the same words last time as is worth checking.

    What an n-gram would have proposed is held against every text that follows, whoever drafted it: under any law of
    the target, a token equals a proposal as often as the proposal would have been accepted. So it never has to probe.
    """

    def __init__(self, match: Match, costs: RoundCosts, longest: int = 16) -> None:
        super().__init__(costs, longest)
        self._match = match
        self._matches = Matches()
        self._found: Sequence[int] = ()
        self._same = 0

    def look(self, context: list[int]) -> tuple[int, float]:
        """As `best`, behind this text."""
        self._found, self._same = self._match(context, self._longest)
        return self.best()

    def next(self, context: list[int]) -> int:
        return self.look(context)[0]

    def rates(self) -> list[float]:
        return self._matches.rates(self._same, len(self._found))

    def observe(self, round_: Round) -> None:
        for same, (guess, token) in enumerate(zip(self._found, round_.kept), self._same):
            self._matches.add(same, guess == token.id)
            if guess != token.id:
                break


class AdaptiveSource:
    """Which of two drafters drafts next, and how much: an n-gram where the text repeats itself, else a model. Each has
    an acceptance and costs of its own."""

    def __init__(self, ngram: Repeating, model: Adaptive) -> None:
        self._ngram, self._model = ngram, model
        self._source: Source = "model"

    def source(self) -> Source:
        return self._source

    def refit(self, costs: RoundCosts) -> None:
        self._ngram.refit(costs.without_network())
        self._model.refit(costs)

    def next(self, context: list[int]) -> int:
        length, rate = self._ngram.look(context)
        if length and rate > self._model.best()[1]:
            self._source = "ngram"
            return length
        self._source = "model"
        return self._model.next(context)

    def observe(self, round_: Round) -> None:
        self._ngram.observe(round_)
        if self._source == "model":
            self._model.observe(round_)
        else:
            self._model.pass_over(round_)
