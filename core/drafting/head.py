"""Drafting with a trained head (EAGLE-3, MTP), one layer that reads the target's hidden states: a chain, or a tree.

Row t of the head's cache pairs the target's features of token t with token t + 1. The features of a round's tokens come
with the verification pass itself, so reading the newest ones also gives the next round's first proposal; behind it, the
head goes on from its own output, row by row, and those rows are dropped after the round.

The tree is EAGLE-2's dynamic one (arXiv 2406.16858): the likeliest continuations by cumulative probability. Which nodes
are kept follows from which tokens they are, so each is a deterministic proposal, a point mass: accepted with p(x), else
x is taken out of p. The head's own probabilities decide the shape alone; whatever they are, the output is the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from core.costs.rounds import PassCosts, RoundCosts
from core.drafting import Draft
from core.drafting.build import Built, Parts, Way
from core.drafting.chain import Chain, Ending
from core.drafting.length import Adaptive, Fixed, Recorded
from core.errors import Cancelled
from core.heads.graph import GraphHeadRunner
from core.heads.mtp import MtpRunner
from core.heads.runner import AnyHeadRunner, HeadRunner
from core.progress import Stop
from core.records import Round, Token, depths
from core.runners import PREFILL_CHUNK, Runner, favourites_of
from core.runners.clock import engine_time, synchronise
from core.runners.features import Features
from core.runners.host import ids_on
from core.sampling import Sampling

BEAMS = 4
"""Nodes of each level of a tree that are drafted on from, and children looked at below each."""
MOST_NODES, DEEPEST = 24, 8


class Reads(Protocol):
    """What a reader of features needs of a runner: stable rows are appended by `read` (`core.heads.runner`)."""

    device: torch.device

    @property
    def length(self) -> int: ...

    def truncate(self, length: int) -> None: ...

    def read(self, ids: Tensor, features: Tensor) -> Tensor: ...


R = TypeVar("R", bound=Reads)


class HeadReader(Generic[R]):
    """Keeps a head's cache in step with its target: what both ways of drafting share.

    `features` are those of the target's runner, which rolls them back with its cache. Its cache is of rows, not of the
    target's tokens.
    """

    cache: Runner | None = None
    _ahead = 1
    """How many tokens after its own a row needs."""
    in_step = True
    """It reads a prompt chunk by chunk behind its target."""

    def __init__(self, runner: R, features: Features, sampling: Sampling) -> None:
        self.runner = runner
        self._features = features
        self._sampling = sampling
        self._begins = features.start
        """The position in the text of the cache's first row."""
        self._stable = 0
        self._output: Tensor | None = None
        """What the newest stable row gave [1, hidden]."""

    def prefill(self, context: list[int], stop: Stop) -> float:
        start = engine_time()
        while (end := min(self._features.start + PREFILL_CHUNK, len(context) - 1)) > self._features.start:
            if stop():
                raise Cancelled
            self._read(context, end)
        synchronise(self.runner.device)
        return engine_time() - start

    def truncate(self, length: int) -> None:
        self.runner.truncate(max(0, min(self._stable, length - self._ahead - self._begins)))
        if self.runner.length < self._stable:
            self._stable, self._output = self.runner.length, None

    def reset(self) -> None:
        self._begins, self._output = self._features.start, None
        self._stable = 0
        self.runner.truncate(0)

    def _refresh(self, context: list[int]) -> Tensor | None:
        """The head's output [1, hidden] after the committed text, having read the features that are new; None where
        the target has not fed all of it but the newest token."""
        if not self._can_go_on(context):
            return None
        if self._features.start < len(context) - 1:
            self._read(context, len(context) - 1)
        return self._output

    def _can_go_on(self, context: list[int]) -> bool:
        """Whether the target has fed all of the text but its newest token; the rows of the last draft are dropped."""
        self.runner.truncate(self._stable)
        return self._features.end >= len(context) - 1

    def _read(self, context: list[int], end: int) -> None:
        """Read the features of the tokens before position `end`."""
        self._output = self.runner.read(*self._unread(context, end))[-1:]
        self._stable = self.runner.length

    def _unread(self, context: list[int], end: int) -> tuple[Tensor, Tensor]:
        """What the rows before position `end` that are not read yet are made of: ids [n] and features [n, …]."""
        start = self._features.start
        if not self._begins <= start <= self._begins + self.runner.length:  # further back than rows can be read again
            self._begins = start
        self.runner.truncate(start - self._begins)
        return ids_on(self.runner.device, context[start + 1 : end + 1]), self._features.take(end)


class HeadDrafter(HeadReader[AnyHeadRunner]):
    """Draws a chain of tokens one by one, through the same sampler chain as the target.

    A reduced vocabulary's law is zero for every token outside it.
    """

    def __init__(
        self, runner: AnyHeadRunner, features: Features, sampling: Sampling, ending: Ending | None = None
    ) -> None:
        super().__init__(runner, features, sampling)
        self.ending = ending

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        if not length or not self._can_go_on(context):
            return Draft.none(self.runner.device)
        if isinstance(self.runner, GraphHeadRunner):
            return self._replayed(self.runner, context, length, uniforms)
        head, output = self.runner.head, self._refresh(context)
        if output is None:
            return Draft.none(self.runner.device)
        chain = Chain(length, self._sampling, uniforms, self.ending)
        while True:
            logits = self.runner.logits(output)
            drawn = chain.draw(logits, favourites=favourites_of(self.runner))
            if drawn is None or not chain.goes_on():
                break
            output = self.runner.draft(head.target_ids[drawn], output)
        draft = chain.draft(self.runner.device)
        draft.tokens, draft.ids = head.target_ids[draft.tokens], head.target_ids
        draft.probs = None if draft.probs is None else head.on_target(draft.probs, 0.0)
        return draft

    def repeat(self, recorded: Recorded) -> None:
        self.ending = None  # the lengths are the recorded ones

    def _replayed(self, runner: GraphHeadRunner, context: list[int], length: int, uniforms: Tensor) -> Draft:
        """The same in one replay, the features that are new included."""
        end, head = len(context) - 1, runner.head
        fresh = self._features.start < end
        ids, rows = self._unread(context, end) if fresh else (ids_on(runner.device, []), self._output)
        if rows is None:
            return Draft.none(runner.device)
        self._stable = runner.length + len(ids)
        chain = runner.chain(ids, rows, length, self._sampling.choose, self._sampling, uniforms)
        self._output = chain.output
        q = None if chain.probs is None else head.on_target(chain.probs, 0.0)
        return Draft(chain.tokens, q, logits=list(chain.logits.split(1)), ids=head.target_ids, ended="length")


TreeRunner = HeadRunner | GraphHeadRunner


class HeadTreeDrafter(HeadReader[TreeRunner]):
    """Drafts on from the likeliest nodes of each level, and keeps as many nodes as checking them is worth.

    `costs` are those of a round; a node is kept while the tokens it is expected to add, by its cumulative probability,
    come faster than those of the round without it.
    """

    def __init__(self, runner: TreeRunner, features: Features, sampling: Sampling, costs: RoundCosts) -> None:
        super().__init__(runner, features, sampling)
        self._costs = costs
        self.nodes: Callable[[], int] | None = None
        """How many nodes to keep, where that is not to be chosen by costs: a recorded run again."""

    def repeat(self, recorded: Recorded) -> None:
        self.nodes = recorded.nodes

    def size(self, length: int) -> int:
        return min(MOST_NODES, BEAMS + (length - 1) * BEAMS * BEAMS) if length else 0

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        output = self._refresh(context) if length else None
        if output is None:
            return Draft.none(self.runner.device)
        head = self.runner.head
        scores: list[Tensor] = []
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        above: list[Tensor] = []
        level = torch.full((1,), -1, device=self.runner.device)
        reached = torch.zeros(1, device=self.runner.device, dtype=torch.float32)
        seen = torch.empty(1, 0, dtype=torch.bool, device=self.runner.device)
        while True:
            logits = self.runner.logits(output)
            k = min(BEAMS, logits.shape[1])
            likely, index = self._likeliest(logits, k)
            first = len(rows)
            scores.append((reached[:, None] + likely).flatten())
            tokens.append(head.target_ids[index].flatten())
            above.append(level[:, None].expand(-1, k).flatten())
            rows += [row for row in logits.split(1) for _ in range(k)]
            if len(tokens) == length:
                break
            reached, chosen = scores[-1].topk(min(BEAMS, len(scores[-1])))
            parent = chosen // k
            own = torch.eye(len(chosen), dtype=torch.bool, device=seen.device)
            seen = torch.cat([seen[parent], own], 1)
            output = self.runner.draft(tokens[-1][chosen], output[parent], seen)
            level = first + chosen
        return self._best(torch.cat(scores), torch.cat(tokens), torch.cat(above), rows, length)

    def _best(self, scores: Tensor, tokens: Tensor, above: Tensor, rows: list[Tensor], length: int) -> Draft:
        """The nodes with the highest cumulative probability: ancestors before their descendants, siblings in order."""
        likely, parent_of = scores.tolist(), above.tolist()
        order = sorted(range(len(likely)), key=lambda i: (-likely[i], i))[: self.size(length)]
        order = order[: self.nodes() if self.nodes else self._worth_checking([likely[i] for i in order], length)]
        at = {node: place for place, node in enumerate(order)}
        parents = [at.get(parent_of[node], -1) for node in order]
        kept = ids_on(tokens.device, order)
        logits = [rows[node] for node in order]
        return Draft(tokens[kept], None, parents, logits=logits, ids=self.runner.head.target_ids)

    def refit(self, costs: RoundCosts) -> None:
        """Rounds cost something else from now on."""
        self._costs = costs

    def _worth_checking(self, likely: list[float], length: int) -> int:
        """How many nodes, the likeliest first, give the most expected tokens per second; one at least."""
        drafting = self._costs.draft(1) + (length - 1) * self._costs.step + self._costs.overhead
        expected, best, most = 1.0, 1, 0.0
        for count, score in enumerate(likely, 1):
            expected += math.exp(score)
            rate = expected / (drafting + self._costs.target(count + 1))
            if rate > most:
                best, most = count, rate
        return best

    def _likeliest(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and columns [m, k] of each row's likeliest tokens [m, draft vocabulary] by the head, at the
        run's temperature; greedy goes by its own certainty. The pass may have told how much a row sums up to."""
        temperature, told = self._sampling.temperature or 1.0, favourites_of(self.runner)
        if temperature == 1 and told and told.shares is not None:
            values, index = logits.topk(k)
            return values - (told.largest - told.shares.log())[:, None], index
        values, index = (logits.float() / temperature).log_softmax(-1).topk(k)
        return values, index


class AdaptiveDepth(Adaptive):
    """How deep to draft: a depth stands if any of its nodes does."""

    def observe(self, round_: Round) -> None:
        best: dict[int, Token] = {}
        for depth, token in zip(depths(round_), round_.drafted):
            if depth not in best or token.outcome == "accepted" or best[depth].outcome == "ignored":
                best[depth] = token
        levels = [best[depth] for depth in sorted(best)]
        chain = [Token(token.id, "", token.outcome, parent=i - 1 if i else None) for i, token in enumerate(levels)]
        super().observe(Round(round_.index, chain, round_.emitted))


def _build(parts: Parts) -> Built:
    head = parts.pair.head
    assert head is not None
    runner = parts.resources.enter_context(head.lease(parts.room))
    # A replay draws a whole chain: only its length can be decided.
    length, ending = (parts.length(), None) if isinstance(runner, GraphHeadRunner) else parts.chain()
    return HeadDrafter(runner, parts.target.watch(head.layers), parts.sampling, ending), length


def _build_tree(parts: Parts) -> Built:
    head, length = parts.pair.head, parts.settings.draft_length
    assert head is not None
    runner = parts.resources.enter_context(head.lease(parts.room))
    assert not isinstance(runner, MtpRunner)
    drafter = HeadTreeDrafter(runner, parts.target.watch(head.layers), parts.sampling, parts.costs)
    return drafter, AdaptiveDepth(parts.costs, DEEPEST) if length == "auto" else Fixed(length)


def _costs(passes: PassCosts, beams: int = 1) -> RoundCosts | None:
    """Of rounds that go on from `beams` of the head's own outputs at a time."""
    return passes.head and RoundCosts(passes.target, passes.head.read, passes.head.draft(beams), rereads=True)


WAYS = {
    "head": Way(_build, lambda passes, settings: _costs(passes)),
    "head-tree": Way(_build_tree, lambda passes, settings: _costs(passes, BEAMS), rows=MOST_NODES + 1),
}
