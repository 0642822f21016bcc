"""Drafting without a model: what followed the same words last time.

N-gram first, a draft model or a trained head where the text does not repeat itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from core.costs.rounds import RoundCosts
from core.drafting import Draft, Drafter
from core.drafting.build import Built, Parts, Way, way_of
from core.drafting.chain import Ending
from core.drafting.length import Adaptive, AdaptiveSource, Recorded, Repeating
from core.progress import Stop
from core.records import Source
from core.runners import Runner
from core.runners.host import ids_on


class NgramDrafter:
    """Continues the longest suffix of the text that occurred before, from its most recent occurrence.

    The index maps each n-gram to the position after its latest occurrence and grows with the text, so a round costs
    the same however long the text is. Proposals are point masses.
    """

    def __init__(self, device: torch.device, shortest: int = 2, longest: int = 8) -> None:
        self._device = device
        self._sizes = range(longest, shortest - 1, -1)
        self.reset()

    cache: Runner | None = None

    def prefill(self, context: list[int], stop: Stop) -> float:
        start = time.perf_counter()
        self._index(context)
        return time.perf_counter() - start

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        found = self.find(context, length)
        if not found:
            return Draft.none(self._device)
        return Draft(ids_on(self._device, found), ended="length" if len(found) == length else "nothing")

    def find(self, context: list[int], length: int) -> list[int]:
        """Up to `length` ids that followed the same words last time; none where the text is new."""
        return self.match(context, length)[0]

    def match(self, context: list[int], length: int) -> tuple[list[int], int]:
        """The same, and how many words those were."""
        self._index(context)
        for n in self._sizes:
            start = self._after.get(tuple(context[-n:])) if len(context) > n else None
            if start is not None:
                return context[start : start + length], n
        return [], 0

    def _index(self, context: list[int]) -> None:
        """Note the n-grams that end before the newest token; the suffix itself must not find itself."""
        for end in range(self._indexed + 1, len(context)):
            for n in self._sizes:
                if end >= n:
                    self._after[tuple(context[end - n : end])] = end
        self._indexed = max(self._indexed, len(context) - 1)

    def repeat(self, recorded: Recorded) -> None:
        """It decides nothing beside the tokens."""

    def truncate(self, length: int) -> None:
        if length < self._indexed:  # text that was committed is taken back: read anew with the next proposal
            self.reset()

    def reset(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0


class CombinedDrafter:
    """Asks the n-gram drafter, unless `source` says to ask the model, which may be any other drafter; where the n-gram
    has nothing, the model drafts (and catches up on what it missed)."""

    def __init__(
        self,
        ngram: NgramDrafter,
        model: Drafter,
        source: Callable[[], Source] = lambda: "ngram",
    ) -> None:
        self._ngram, self._model, self.source = ngram, model, source
        self.cache = model.cache
        self.in_step: bool = getattr(model, "in_step", False)

    @property
    def ending(self) -> Ending | None:
        """The model's, where it has one."""
        return getattr(self._model, "ending", None)

    @ending.setter
    def ending(self, ending: Ending | None) -> None:
        self._model.ending = ending  # type: ignore[attr-defined]

    def prefill(self, context: list[int], stop: Stop) -> float:
        return self._ngram.prefill(context, stop) + self._model.prefill(context, stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        draft, source = None, self.source()
        if source == "ngram":
            draft = self._ngram.propose(context, length, uniforms)
        if not draft:
            draft, source = self._model.propose(context, length, uniforms), "model"
        draft.source = source
        return draft

    def repeat(self, recorded: Recorded) -> None:
        self.source = recorded.source
        self._model.repeat(recorded)

    def truncate(self, length: int) -> None:
        self._ngram.truncate(length)
        self._model.truncate(length)

    def reset(self) -> None:
        self._ngram.reset()
        self._model.reset()


def _before(other: str) -> Way:
    """The n-gram drafter where the text repeats itself, another method elsewhere."""

    def build(parts: Parts) -> Built:
        model, length = way_of(other).build(parts)
        ngram = NgramDrafter(parts.target.device)
        if not isinstance(length, Adaptive):
            return CombinedDrafter(ngram, model), length
        chosen = AdaptiveSource(Repeating(ngram.match, parts.costs.without_network()), length)
        return CombinedDrafter(ngram, model, chosen.source), chosen

    return Way(build, lambda passes, settings: way_of(other).costs(passes, settings))


def _alone(parts: Parts) -> Built:
    ngram, length = NgramDrafter(parts.target.device), parts.length()
    return ngram, Repeating(ngram.match, parts.costs) if isinstance(length, Adaptive) else length


WAYS = {
    "ngram": Way(
        _alone,
        lambda passes, settings: RoundCosts(passes.target),
    ),
    "ngram+draft": _before("draft"),
    "ngram+head": _before("head"),
}
