"""Drafting a block in one pass (DFlash, DSpark, P-EAGLE) from the target's hidden states: a chain.

A pass gives all positions their hidden states at once; then the tokens are drawn one by one, since a bias may depend on
the one before, and each from the very law that is told: bias, sampler chain and reduced vocabulary included.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from core.costs.rounds import PassCosts, RoundCosts
from core.drafting import Draft
from core.drafting.build import Built, Parts, Way
from core.drafting.chain import Chain, Ending
from core.drafting.head import HeadReader
from core.drafting.length import Recorded
from core.heads.parallel import Blocks, ParallelRunner, in_blocks
from core.runners import favourites_of
from core.runners.features import Features
from core.runners.host import ids_on
from core.sampling import Sampling
from core.settings import Settings


class BlockDrafter(HeadReader[Blocks | ParallelRunner]):
    """Draws up to as many tokens as a block has. Its cache is of rows that are the target's alone, so that it is exact
    whatever was drafted."""

    def __init__(
        self,
        runner: Blocks | ParallelRunner,
        features: Features,
        sampling: Sampling,
        ending: Ending | None = None,
    ) -> None:
        super().__init__(runner, features, sampling)
        self.ending = ending
        self._ahead = 0 if isinstance(runner, Blocks) else 1

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        head, device = self.runner.head, self.runner.device
        length = min(length, head.drafted)
        hidden = self._advance(context, length) if length else None
        if hidden is None:
            return Draft.none(device)
        previous, state = ids_on(device, context[-1:]), None
        chain = Chain(length, self._sampling, uniforms, self.ending)
        rows, told = self.runner.logits(hidden).split(1), favourites_of(self.runner)
        for i, (base, row) in enumerate(zip(rows, hidden.split(1))):
            logits, state = self.runner.after(base, row, previous, state)
            favourites = told.of(i) if told else favourites_of(self.runner)
            drawn = chain.draw(logits, partial(self.runner.confidence, row, previous), favourites)
            if drawn is None or not chain.goes_on():
                break
            previous = head.target_ids[drawn]
        draft = chain.draft(device)
        draft.tokens, draft.ids = head.target_ids[draft.tokens], head.target_ids
        draft.probs = None if draft.probs is None else head.on_target(draft.probs, 0.0)
        return draft

    def repeat(self, recorded: Recorded) -> None:
        self.ending = None  # the lengths are the recorded ones

    def _advance(self, context: list[int], length: int) -> Tensor | None:
        """Hidden states [length, hidden] behind the committed text, having read the features that are new; None where
        the target has not fed all of it but the newest token."""
        end = len(context) - 1
        if not self._can_go_on(context) or self._features.start >= end:
            return None
        hidden = self.runner.advance(*self._unread(context, end), length)
        self._stable = self.runner.length
        return hidden


def _build(parts: Parts) -> Built:
    head = parts.pair.head
    assert head is not None
    runner = in_blocks(parts.resources.enter_context(head.lease(parts.room)))
    length, ending = parts.chain()
    return BlockDrafter(runner, parts.target.watch(head.layers), parts.sampling, ending), length


def _costs(passes: PassCosts, settings: Settings) -> RoundCosts | None:
    """A whole block, and for each token more what drawing it takes."""
    return passes.head and RoundCosts(passes.target, passes.head.read, passes.head.draft(1), rereads=True)


WAYS = {"block": Way(_build, _costs)}
