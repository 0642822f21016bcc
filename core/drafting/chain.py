"""A chain in the making: each token is drawn, or the draft ended, by the distribution there and what came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from core.drafting import Draft
from core.records import Ended
from core.runners import Favourites
from core.sampling import Sampling, draw, likeliest


class Ending(Protocol):
    """Where a draft ends. Both are asked before the token in question is drawn, so that keeping it can depend on the
    tokens before it and on the distribution it would be drawn from, never on itself: that keeps it lossless."""

    def begin(self) -> None:
        """A new draft: nothing stands in it yet."""
        ...

    def goes_on(self) -> bool:
        """Whether another pass of the drafter, for the next distribution, is worth its time."""
        ...

    def takes(self, confidence: float) -> bool:
        """Whether to draw from a distribution with this highest probability."""
        ...


def confidence_of(rows: Tensor, q: Tensor | None) -> Tensor:
    """The highest probability [n] of each law q [n, vocab]; without one, where the likeliest token is a point mass,
    that of the softmax of logits [n, vocab]."""
    return (rows.softmax(-1, dtype=torch.float32) if q is None else q).amax(-1)


Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""As `Sampling.choose`."""


class Chain:
    """Up to `length` tokens drawn one by one, through the same sampler chain as the target's; `uniforms` are theirs.
    `choose` is how, where nothing asks first how sure the drafter is.

    `ending` decides where the chain ends sooner. That makes the host wait for a number of every token; without it, a
    device never waits.
    """

    def __init__(
        self,
        length: int,
        sampling: Sampling,
        uniforms: Tensor,
        ending: Ending | None = None,
        choose: Choose | None = None,
    ) -> None:
        self._length, self._sampling, self._uniforms, self._ending = length, sampling, uniforms, ending
        self._choose = choose or sampling.choose
        self._indices: list[Tensor] = []
        self._laws: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._confidences: list[float] = []
        self._ended: Ended = "nothing"
        self._refused: float | None = None
        self._sure: Callable[[], float | None] | None = None
        self._share: Callable[[], float] | None = None
        if ending is not None:
            ending.begin()

    def draw(
        self,
        row: Tensor,
        sure: Callable[[], float | None] | None = None,
        favourites: Favourites | None = None,
    ) -> Tensor | None:
        """The index [1] drawn next, by the drafter's logits [1, vocab], whose `favourites` the pass may have told; None
        where it is not worth being drawn. `sure` tells how likely it is to stand where the drafter knows better than
        its law does, by what comes before it."""
        self._sure = sure
        if favourites and self._sampling.greedy:
            self._share = None if favourites.shares is None else favourites.shares.item
            return self.add(row, None, favourites.ids)
        if self._ending is None:
            return self._keep(row, *self._choose(row, self._uniform))
        if self._sampling.greedy:
            return self.add(row, None, likeliest(row)[1])
        return self.add(row, self._sampling.probabilities(row))

    def add(self, row: Tensor, q: Tensor | None, favourite: Tensor | None = None) -> Tensor | None:
        """The same by the law [1, vocab] itself; without one, the `favourite` [1] is the point mass. `row` are the
        logits that it comes from, to be shown."""
        if self._ending is not None:
            chance = self._sure() if self._sure else None
            if chance is None and self._share:
                chance = self._share()
            confidence = confidence_of(row, q).item() if chance is None else chance
            if not self._ending.takes(confidence):
                self._ended, self._refused = "unsure", confidence
                return None
            self._confidences.append(confidence)
        if q is not None:
            return self._keep(row, draw(q, self._uniform), q)
        assert favourite is not None
        return self._keep(row, favourite, None)

    @property
    def _uniform(self) -> Tensor:
        drawn = len(self._indices)
        return self._uniforms[drawn : drawn + 1]  # none where the choice is greedy

    def _keep(self, row: Tensor, index: Tensor, q: Tensor | None) -> Tensor:
        if q is not None:
            self._laws.append(q)
        self._indices.append(index)
        self._rows.append(row)
        return index

    def goes_on(self) -> bool:
        """Whether another pass of the drafter is worth its time."""
        if len(self._indices) == self._length:
            self._ended = "length"
            return False
        if self._ending is not None and not self._ending.goes_on():
            self._ended = "odds"
            return False
        return True

    def draft(self, device: torch.device) -> Draft:
        """What was drawn; laws and tokens are over the drafter's own columns."""
        if not self._indices:
            return Draft(torch.empty(0, dtype=torch.long, device=device), ended=self._ended, refused=self._refused)
        q = torch.cat(self._laws) if self._laws else None
        tokens, sure = torch.cat(self._indices), self._confidences or None
        return Draft(tokens, q, logits=self._rows, confidences=sure, ended=self._ended, refused=self._refused)
