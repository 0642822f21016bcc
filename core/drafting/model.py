"""Drafting with a smaller model, or with the early-exit view of the target: both are runners.

Self-speculation: which of the target's layers to leave after. The drafter itself is `ModelDrafter` over a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.costs import time_exit
from core.costs.rounds import PassCosts, RoundCosts, exit_costs, expected_tokens
from core.drafting import Draft
from core.drafting.build import Built, Parts, Way
from core.drafting.chain import Chain, Ending
from core.drafting.length import Recorded
from core.drafting.translate import TranslateDrafter
from core.errors import UserError
from core.loading.model import Model
from core.progress import Stop
from core.runners import Runner, favourites_of, prefill
from core.runners.capture import replayed
from core.runners.host import ids_on
from core.runners.native import NativeRunner
from core.sampling import Sampling, likeliest
from core.settings import Settings
from core.text import read_prompts


class ModelDrafter:
    """Draws a chain of tokens one by one from a runner, through the same sampler chain as the target.

    `limit`: how many tokens fit in the draft's context; a longer text goes on without it.
    """

    def __init__(
        self, runner: Runner, sampling: Sampling, limit: int | None = None, ending: Ending | None = None
    ) -> None:
        self.runner = runner
        self.cache: Runner | None = runner
        self.ending = ending
        self._sampling = sampling
        self._limit = limit
        if isinstance(runner, NativeRunner):
            runner.shares = True

    def prefill(self, context: list[int], stop: Stop) -> float:
        return prefill(self.runner, context[: self._limit], stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        if self._limit is not None:
            length = min(length, self._limit - len(context) + 1)  # the last drafted token is not fed
        if length < 1:
            return Draft.none(self.runner.device)
        fresh = ids_on(self.runner.device, context[self.runner.length :])
        chain = Chain(length, self._sampling, uniforms, self.ending, self._choose)
        while True:
            logits = self.runner.feed(fresh, rows=1)
            drawn = chain.draw(logits, favourites=favourites_of(self.runner))
            if drawn is None or not chain.goes_on():
                break
            fresh = drawn
        return chain.draft(self.runner.device)

    def _choose(self, row: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the sampler chain does; where a device replays graphs, its many small operations in one."""
        if self._sampling.greedy:
            return self._sampling.choose(row, uniform)
        key = "draw", self._sampling, row.shape, row.dtype
        q, token = replayed(row.device, key, self._drawn, (row, uniform))
        return token, q

    def _drawn(self, row: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        token, q = self._sampling.choose(row, uniform)
        assert q is not None
        return q, token

    def repeat(self, recorded: Recorded) -> None:
        self.ending = None  # the lengths are the recorded ones

    def truncate(self, length: int) -> None:
        self.runner.truncate(length)

    def reset(self) -> None:
        self.runner.truncate(0)


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the target's first layers, which write into the target's own cache."""

    def __init__(self, view: Any, sampling: Sampling, ending: Ending | None = None) -> None:
        super().__init__(view, sampling, ending=ending)
        self.cache: Runner | None = None
        self.exit_layer: int = view.layers


class InTargetWidth:
    """A draft's runner over the target's vocabulary [width], where models of one tokenizer differ in their rows: a
    token that only the target has is never proposed, and read as the draft's last; what only the draft has is cut off.
    """

    def __init__(self, runner: Runner, rows: int, width: int) -> None:
        self._runner, self._rows, self._width = runner, rows, width
        self.kind, self.device = runner.kind, runner.device

    @property
    def length(self) -> int:
        return self._runner.length

    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        logits = self._runner.feed(ids.clamp(max=self._rows - 1), parents, rows=rows)
        return pad(logits, (0, self._width - self._rows), value=-torch.inf)  # a negative width cuts off

    def truncate(self, length: int) -> None:
        self._runner.truncate(length)

    def keep(self, path: Sequence[int]) -> None:
        self._runner.keep(path)


SHARES = (0.125, 0.25, 0.375, 0.5)
"""Of the target's layers: the exits that are tried. A later one costs more than half a pass for every drafted token."""
SAMPLE = 256
LONGEST = 8
TRIED = (1, 2, 5, 9)
"""Passes that are timed for an exit that is only tried."""


def exit_layer(target: Model, asked: int | None) -> int:
    """The layer early exit leaves after: the one asked for, else the one that promises most by measurement."""
    if asked is None:
        if target.exit_layer is None:
            target.exit_layer, target.exit_agreement = measure_exit_layer(target)
        return target.exit_layer
    if not 1 <= asked < target.layers:
        raise UserError(
            f"The exit layer must be between 1 and {target.layers - 1} for a target of {target.layers} layers, "
            f"not {asked}."
        )
    return asked


def measure_exit_layer(target: Model) -> tuple[int, float]:
    """The exit layer that promises most, and its agreement: how often each exit agrees with the whole model on a few
    lines of text, weighed against what it costs: its own head included, and what the full pass saves by resuming from
    it."""
    text = "\n\n".join(prompt.text for prompt in read_prompts())
    room = min(SAMPLE, target.context_length)
    ids = torch.tensor(target.tokenizer.encode(text)[:room], device=target.device).clamp(max=target.vocab_size - 1)
    context = target.short_context(TRIED)
    promises: dict[int, float] = {}
    agreed: dict[int, float] = {}
    with target.lease() as runner:
        whole = likeliest(runner.feed(ids))[1]
        for layer in sorted({max(1, round(share * target.layers)) for share in SHARES}):
            runner.reset()
            agreed[layer] = (likeliest(runner.view(layer).feed(ids))[1] == whole).float().mean().item()
            runner.reset()
            costs = exit_costs(*time_exit(runner, layer, context, 2, TRIED))
            _, promises[layer] = costs.best_chain(partial(expected_tokens, agreed[layer]), range(1, LONGEST + 1))
    best = max(promises, key=lambda layer: promises[layer])
    return best, agreed[best]


def _build_exit(parts: Parts) -> Built:
    asked, model = parts.settings.exit_layer, parts.pair.target
    layers = exit_layer(model, asked)
    agreed = model.exit_agreement if asked is None else None
    length, ending = parts.chain(agreed)
    return EarlyExitDrafter(parts.target.view(layers), parts.sampling, ending), length


def lease_draft(parts: Parts) -> tuple[Runner, int]:
    """A runner of the pair's draft, with the target's tokens wherever they have a tokenizer in common; and how many
    tokens fit in its context."""
    draft, target = parts.pair.draft, parts.pair.target
    assert draft is not None
    runner: Runner = parts.resources.enter_context(draft.lease(parts.room))
    if not parts.pair.translation and draft.vocab_size != target.vocab_size:
        runner = InTargetWidth(runner, draft.vocab_size, target.vocab_size)
    return runner, draft.context_length


def _build_draft(parts: Parts) -> Built:
    runner, limit = lease_draft(parts)
    length, ending = parts.chain()
    if translation := parts.pair.translation:
        return TranslateDrafter(runner, parts.sampling, translation, limit, ending), length
    return ModelDrafter(runner, parts.sampling, limit, ending), length


def draft_costs(passes: PassCosts, settings: Settings) -> RoundCosts | None:
    if passes.verify is None or passes.draft is None:
        return None
    return RoundCosts(passes.verify, passes.draft, passes.draft.following)


WAYS = {
    "draft": Way(_build_draft, draft_costs),
    "early-exit": Way(_build_exit, lambda passes, settings: passes.exits.get(settings.exit_layer)),
}
