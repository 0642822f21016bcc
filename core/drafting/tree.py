"""SpecInfer-style trees: several continuations at once, judged by one target pass (arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from core.costs.rounds import RoundCosts, Shape, count_nodes
from core.drafting import Draft
from core.drafting.build import Built, Parts, Way
from core.drafting.length import Fixed, Probing, Recorded
from core.drafting.model import ModelDrafter, draft_costs, lease_draft
from core.errors import UserError
from core.progress import Stop
from core.records import Round
from core.runners import Runner
from core.runners.host import ids_on
from core.sampling import Sampling, draw

MOST_NODES, MOST_LEVELS = 64, 16


def parse_shape(text: str) -> Shape:
    """ "4x2x1" -> (4, 2, 1)."""
    parts = text.lower().split("x", MOST_LEVELS)
    shape = tuple(int(part) for part in parts if part.isdecimal() and len(part) < 3)
    if len(shape) < len(parts) or min(shape) < 1:
        raise UserError(
            f"A tree is written as children by depth, up to {MOST_LEVELS} deep, such as 4x2x1; {text[:40]!r} is not."
        )
    if count_nodes(shape) > MOST_NODES:
        raise UserError(f"The tree {text} has {count_nodes(shape):,} nodes; at most {MOST_NODES} fit in a pass.")
    return shape


class TreeDrafter:
    """Grows a tree level by level from a draft model's runner.

    Siblings are the likeliest tokens (greedy) or drawn one after the other, with or without replacement. Each level is
    one pass over the tree so far: the passes are as many as a chain of the same depth takes. A tree that does not
    branch is drafted as the chain it is, which feeds every token once. `limit`: how many tokens fit in the draft's
    context.
    """

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        shape: Callable[[], Shape],
        limit: int | None = None,
        replacement: bool = False,
    ) -> None:
        self.runner = runner
        self.cache: Runner | None = runner
        self._sampling = sampling
        self.shape = shape
        self._limit = limit
        self._replacement = replacement
        self._chain = ModelDrafter(runner, sampling, limit)
        self._text: int | None = None
        """How many tokens of the cache are text, where it ends in a tree."""

    def prefill(self, context: list[int], stop: Stop) -> float:
        return self._chain.prefill(context, stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        shape = self.shape()[:length]
        if set(shape) == {1}:
            draft = self._chain.propose(context, len(shape), uniforms)
            draft.shape = shape
            return draft
        if self._limit is not None:
            length = min(length, self._limit - len(context) + 1)  # the last level is not fed
        if length < 1:
            return Draft.none(self.runner.device)
        drawn: list[Tensor] = []
        parents: list[int] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        level, used = [-1], 0
        self._text = len(context)
        rows = self.runner.feed(ids_on(self.runner.device, context[self.runner.length :]), rows=1)
        for width in shape[:length]:
            if drawn:
                rows = self._rows_after(torch.cat(drawn), parents, len(level))
            m = len(level)
            children, counts, q = self._siblings(rows, uniforms[used : used + m * width], width)
            used += m * width
            row_of = [i for i, count in enumerate(counts) for _ in range(count)]
            grown = [level[i] for i in row_of]
            level = list(range(len(parents), len(parents) + len(grown)))
            parents += grown
            drawn.append(children)
            if row_of != list(range(m)):  # a row for each child
                index = ids_on(rows.device, row_of)
                rows, q = rows.index_select(0, index), None if q is None else q.index_select(0, index)
            logits.append(rows)
            if q is not None:
                probs.append(q)
        q = torch.cat(probs) if probs else None
        return Draft(torch.cat(drawn), q, parents, self._replacement, shape, logits=logits)

    def _rows_after(self, tokens: Tensor, parents: list[int], count: int) -> Tensor:
        """The draft's logits after the last `count` nodes, from one pass over the whole tree so far."""
        self.runner.truncate(self._text or 0)
        return self.runner.feed(tokens, parents, rows=count)

    def _siblings(self, rows: Tensor, uniforms: Tensor, width: int) -> tuple[Tensor, list[int], Tensor | None]:
        """Up to `width` children for each of a level's logits [m, vocab] from uniforms [m * width]: their ids, row by
        row, how many of each row, and the laws [m, vocab] the first ones were drawn from (None: point masses). The host
        waits for the device only where a law may run out of tokens: when several are drawn from it without
        replacement."""
        m = len(rows)
        if self._sampling.greedy:
            width = min(width, rows.shape[1])
            return rows.topk(width).indices.flatten(), [width] * m, None
        q = self._sampling.probabilities(rows)
        if width == 1:
            return draw(q, uniforms), [1] * m, q
        left, children, lasts = q, [], []
        for uniform in uniforms.view(m, width).unbind(1):
            lasts.append(left.sum(-1) > 0)
            children.append(draw(left, uniform))
            if not self._replacement:
                left = left.scatter(1, children[-1][:, None], 0.0)
        siblings = torch.stack(children, 1)
        counts = [width] * m if self._replacement else torch.stack(lasts).sum(0).tolist()
        if min(counts) == width:
            return siblings.flatten(), counts, q
        return torch.cat([row[:count] for row, count in zip(siblings, counts)]), counts, q

    def repeat(self, recorded: Recorded) -> None:
        self.shape = recorded.shape

    def truncate(self, length: int) -> None:
        # Of a tree nothing is kept: the accepted path is fed again with the next round.
        self.runner.truncate(length if self._text is None else min(length, self._text))
        self._text = None

    def reset(self) -> None:
        self.truncate(0)


class AdaptiveShape:
    """Chooses a tree's shape every few rounds: the one that maximises expected tokens per second, be it a chain, or no
    draft at all; while that is best, it probes with a single token.

    What it learns is how often the first, second, … sibling was the accepted one (the measured acceptance by rank).
    It is both the drafter's shape and the run's draft-length controller.
    """

    WIDTHS = (*product((1, 2, 3, 4), (1, 2, 3), (1, 2), (1,), (1,), (1,)), (1,) * MOST_LEVELS)
    PRIOR = (0.6, 0.15, 0.07, 0.04)
    PRIOR_WEIGHT, MEMORY = 8.0, 0.97
    STANDS = 4
    """Rounds for which a choice stands: to choose among all shapes takes as long as to sample a few tokens."""

    def __init__(self, costs: RoundCosts) -> None:
        self._accepted = [share * self.PRIOR_WEIGHT for share in self.PRIOR]
        self._judged = [self.PRIOR_WEIGHT] * len(self.PRIOR)
        # Sorted, a shape comes after the one it grows from by a level; () is where all begin: a plain step.
        grown = {w[:depth] for w in self.WIDTHS for depth in range(len(w) + 1)}
        self._shapes = sorted(shape for shape in grown if count_nodes(shape) <= MOST_NODES)
        self.refit(costs)
        self._shape: Shape = ()
        self._standing = 0
        self._behind = 0
        self._probing = Probing()

    def refit(self, costs: RoundCosts) -> None:
        """Rounds cost something else from now on."""
        self._costs = costs
        at = {shape: i for i, shape in enumerate(self._shapes)}
        self._growth = [(at[s[:-1]], s[-1], costs.tree(s)) for s in self._shapes[1:]]

    def __call__(self) -> Shape:
        return self._shape or (1,)

    def next(self, context: list[int]) -> int:
        if not self._standing:
            self._shape, self._standing = self._best(), self.STANDS
        if self._shape:
            self._standing -= 1
            self._probing.rest()
            return len(self._shape)
        # The choice stands until a probe has told something new.
        return int(self._probing.due(self._costs, self._behind))

    def observe(self, round_: Round) -> None:
        for siblings in _tested(round_):
            for rank in range(min(len(siblings), len(self._accepted))):
                self._judged[rank] = self._judged[rank] * self.MEMORY + 1
                self._accepted[rank] = self._accepted[rank] * self.MEMORY + (siblings[rank] == "accepted")
        if round_.drafted and not self._shape:
            self._standing = 0
        # Of a tree the drafter keeps nothing, of a chain all that stands.
        branched = round_.drafted and set(self()) != {1}
        self._behind = len(round_.kept) - 1 if branched else self._costs.missed(round_, self._behind)

    def _best(self) -> Shape:
        """A level is passed if any of its siblings is accepted."""
        shares = [a / j for a, j in zip(self._accepted, self._judged)]
        passed = [min(1.0, sum(shares[:width])) for width in range(len(shares) + 1)]
        late = self._costs.late(self._behind)
        reached, expected, rates = [1.0], [1.0], [1 / self._costs.plain]
        for shorter, width, seconds in self._growth:
            reached.append(reached[shorter] * passed[width])
            expected.append(expected[shorter] + reached[-1])
            rates.append(expected[-1] / (seconds + late))
        return self._shapes[rates.index(max(rates))]


def _tested(round_: Round) -> list[list[str]]:
    """Outcomes of each group of siblings that was judged, in draw order."""
    groups: dict[int | None, list[str]] = {}
    for token in round_.drafted:
        groups.setdefault(token.parent, []).append(token.outcome)
    return [g for g in groups.values() if any(outcome != "ignored" for outcome in g)]


def _build(parts: Parts) -> Built:
    runner, limit = lease_draft(parts)
    if parts.settings.tree in (None, "auto"):
        adaptive = AdaptiveShape(parts.costs)
        return TreeDrafter(runner, parts.sampling, adaptive, limit), adaptive
    shape = parse_shape(parts.settings.tree)
    return TreeDrafter(runner, parts.sampling, lambda: shape, limit), Fixed(len(shape))


WAYS = {"tree": Way(_build, draft_costs, rows=MOST_NODES + 1)}
