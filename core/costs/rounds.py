"""What a round costs by what it drafts, and the speed-up that follows: the one cost model; first the papers' formulas,
which know acceptance and one ratio of costs.

The controllers choose by measured costs, early exit chooses its layer by them, and the bench and the sweep promise by
them, so that a choice and the promise it is held against cannot differ in what they count. Seconds come from
`core.costs`. In the formulas α is the chance that a drafted token is accepted, γ the draft length, c the time of a
draft step over that of a plain target step. Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from core.costs import CostTable
from core.records import Round, accepted_by_position

if TYPE_CHECKING:
    from core.heads.runner import HeadCosts


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per round with independent acceptance: (1 - α^(γ+1)) / (1 - α), equation 1 of the paper."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_tokens_by_position(reached: Sequence[float], gamma: int) -> float:
    """1 + Σ aᵢ over the first γ positions, aᵢ = P(at least i tokens accepted). Holds without independence."""
    return 1 + sum(reached[:gamma])


def acceptance_rate(reached: Sequence[float]) -> float:
    """Accepted ÷ judged of chains with P(at least i tokens accepted) = aᵢ: a token is judged where all before it are
    accepted."""
    return sum(reached) / sum([1.0, *reached[:-1]])


def leviathan(alpha: float, gamma: int, c: float) -> float:
    """Theorem 3.8: E / (γc + 1). Assumes that verifying γ+1 tokens costs what one token costs."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def rule_of_thumb(alpha: float, gamma: int) -> float:
    """1 / (1 - α + α/γ): an Amdahl-style interpolation, exact only at α = 0 and 1. For comparison, not prediction."""
    return 1 / (1 - alpha + alpha / gamma) if gamma else 1.0


def best_length(alpha: float, c: float, longest: int = 64) -> int:
    """The draft length that maximises `leviathan`; 0 where speculation cannot gain."""
    return max(range(longest + 1), key=lambda gamma: (leviathan(alpha, gamma, c), -gamma))


Seconds = Callable[[int], float]
"""Time of one pass over n tokens."""
Shape = tuple[int, ...]
"""Children of every node by depth: (4, 2, 1) is four first tokens, two continuations of each, one of each of those."""


def count_nodes(shape: Shape) -> int:
    return sum(prod(shape[: depth + 1]) for depth in range(len(shape)))


def free(n: int) -> float:
    """Of a drafter without a model."""
    return 0.0


def _of_all(seconds: Seconds, texts: int, shared: bool) -> Seconds:
    """Of passes over n tokens of each text: of one over the rows of all, or of one after the other."""
    return (lambda n: seconds(texts * n)) if shared else (lambda n: texts * seconds(n))


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds of one drafter.

    `target`: the target's pass over n tokens as it stands in a round: one is a plain step, n behind n - 1 drafted.
    `draft`: the drafter's first pass of a round, over the newest token and those it missed; `following`: its pass over
    one token right behind another of its own (without it, draft(1)). Beside its passes, a round takes `overhead`, and
    for each drafted token what it takes to draw it, `drawing`, and to judge it, `judging`. `catches_up`: whether tokens
    that others drafted, or nobody, are still to be read by the drafter; `rereads`: so are its own that stand.
    """

    target: Seconds
    draft: Seconds = free
    following: float | None = None
    overhead: float = 0.0
    drawing: float = 0.0
    judging: float = 0.0
    catches_up: bool = True
    rereads: bool = False

    @property
    def plain(self) -> float:
        """Of a step without a draft."""
        return self.target(1) + self.overhead

    @property
    def step(self) -> float:
        """Of one more token of a chain."""
        return self.draft(1) if self.following is None else self.following

    def chain(self, length: int, behind: int = 0, refused: bool = False) -> float:
        """Of a round that drafts `length` tokens one by one, the drafter being `behind` tokens late; `refused`: it
        looked at one token more and did not draft it."""
        if not length + refused:
            return self.plain
        drafting = self.draft(1) + self.late(behind) + (length + refused - 1) * self.step
        return drafting + (length + refused) * self.drawing + self.checked(length)

    def checked(self, drafted: int) -> float:
        """What a round takes beside drafting so many tokens."""
        return self.target(drafted + 1) + drafted * self.judging + self.overhead

    def tree(self, shape: Shape, behind: int = 0) -> float:
        """Of a round that drafts a tree: a pass of the drafter for each level, over the tree so far. A tree that does
        not branch is drafted as the chain it is."""
        if set(shape) <= {1}:
            return self.chain(len(shape), behind)
        levels = [count_nodes(shape[:depth]) for depth in range(1, len(shape) + 1)]
        warm = self.step - self.draft(1)
        drafting = self.draft(1) + self.late(behind) + sum(self.draft(nodes) + warm for nodes in levels[:-1])
        return drafting + levels[-1] * self.drawing + self.checked(levels[-1])

    def grown(self, short: CostTable, here: CostTable, share: float) -> RoundCosts:
        """Of rounds behind a longer text, by the same passes of the target behind a `short` one and `here`: each row
        reads all that was kept, so the difference is a line in the rows. The drafter's passes grow by its `share` of
        the target's layers."""
        first, last = min(here.seconds), max(here.seconds)
        start = max(0.0, here(first) - short(first))
        climb = max(0.0, here(last) - short(last) - start) / (last - first)
        return replace(
            self,
            target=lambda n: self.target(n) + start + climb * (n - first),
            draft=lambda n: self.draft(n) + share * (start + climb * (n - first)),
            following=None if self.following is None else self.following + share * start,
        )

    def at_once(self, texts: int, shared: bool = True, judged: bool = True) -> RoundCosts:
        """Of rounds of so many texts in step: passes of the drafter are over the rows of all where they are `shared`,
        those of the target where all are `judged` in one, else each text has its own; all else comes once for each."""
        return replace(
            self,
            target=_of_all(self.target, texts, judged),
            draft=_of_all(self.draft, texts, shared),
            following=self._following(texts if shared else 1) * (1 if shared else texts),
            overhead=texts * self.overhead,
            drawing=texts * self.drawing,
            judging=texts * self.judging,
        )

    def _following(self, texts: int) -> float:
        """A pass over one token of each text right behind another of the drafter's own."""
        return self.draft(texts) + self.step - self.draft(1)

    def without_network(self) -> RoundCosts:
        """Of rounds that something without a model drafts, in the same place."""
        return RoundCosts(self.target, overhead=self.overhead, judging=self.judging)

    def late(self, behind: int) -> float:
        """What reading `behind` missed tokens adds to the drafter's first pass."""
        return self.draft(1 + behind) - self.draft(1) if behind and self.catches_up else 0.0

    def missed(self, round_: Round, behind: int, drafted: bool = True) -> int:
        """How many tokens the drafter is late after a round, `behind` before it; `drafted`: by it."""
        looked_further = round_.refused is not None
        if not (drafted and (round_.drafted or looked_further)):
            return behind + len(round_.kept)
        if self.rereads:
            return len(round_.kept) - 1
        # After full acceptance it has not fed its own last token, unless for a look at the next.
        return int(not looked_further and all(token.outcome == "accepted" for token in round_.drafted))

    def speed_up(self, expected: float, length: int, share: float = 1.0) -> float:
        """Over plain decoding, with `expected` tokens from a round that drafts `length`: the honest formula,
        E · t(1) / (γ·t_draft + t(γ+1) + overhead), overhead also on a plain step. Of the rounds a `share` drafts, the
        others are plain steps."""
        tokens = share * expected + (1 - share)
        return tokens * self.plain / (share * self.chain(length) + (1 - share) * self.plain)

    def best_chain(self, expected: Callable[[int], float], lengths: Iterable[int]) -> tuple[int, float]:
        """The draft length, of these, with the largest `speed_up`, the first of equals, and that; `expected`: tokens
        of a round by its length."""
        gains = {length: self.speed_up(expected(length), length) for length in lengths}
        best = max(gains, key=lambda length: gains[length])
        return best, gains[best]


@dataclass(frozen=True)
class PassCosts:
    """Passes over n tokens as they were measured: of the target alone, of the target behind its draft, of the draft;
    `exits`: rounds of early exit, by its layer as it is asked for; `head`: of a trained head."""

    target: CostTable
    verify: CostTable | None = None
    draft: CostTable | None = None
    exits: Mapping[int | None, RoundCosts] = field(default_factory=dict)
    head: HeadCosts | None = None


def exit_costs(verify: CostTable, draft: CostTable) -> RoundCosts:
    """Of early exit, from `core.costs.time_exit`: where the target has been, its first layers have been too."""
    return RoundCosts(verify, draft, draft.following, catches_up=False)


@dataclass(frozen=True)
class Promise:
    """What measured costs and acceptance allow a run: its rounds would yield `tokens` and take `seconds`, overhead
    apart; `step` is the seconds of a plain pass."""

    tokens: float
    seconds: float
    rounds: int
    step: float

    def ratio(self, overhead: float = 0.0) -> float:
        """Speed-up over plain decoding; `overhead` is what a round costs beside its passes."""
        return self.tokens * (self.step + overhead) / (self.seconds + self.rounds * overhead)


def promise(rounds: Sequence[Round], costs: RoundCosts) -> Promise:
    """`RoundCosts.speed_up` for the draft lengths a run of chains used, which may differ from round to round: every
    round is charged for its passes, the drafter's catching-up included, and credited 1 + Σ aᵢ over the positions it
    drafted. Of two drafters that take turns each is held against its own rounds; `costs` are the model's."""
    sources = {round_.source for round_ in rounds}
    reached = {source: accepted_by_position([r for r in rounds if r.source == source]) for source in sources}
    of_source = {source: costs.without_network() if source == "ngram" else costs for source in sources}
    tokens = seconds = 0.0
    behind = 0
    for round_ in rounds:
        drafted, source = len(round_.drafted), round_.source
        tokens += expected_tokens_by_position(reached[source], drafted)
        spent = of_source[source].chain(drafted, behind, round_.refused is not None)
        seconds += spent - costs.overhead
        behind = costs.missed(round_, behind, drafted=source != "ngram")
    return Promise(tokens, seconds, len(rounds), costs.target(1))
