"""Speculation whose acceptance is known beforehand: real passes, but the text and the hits are scripted.

Random weights agree on nothing. Here the target's every answer is the next token of a fixed text, and each drafted
token is that token with the chance asked for, drawn from the round's own uniforms. Every pass is run in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.drafting import Draft
from core.progress import Stop
from core.runners import Runner, prefill
from core.runners.host import ids_on

CERTAIN = 1e4


class ScriptedTarget:
    """A runner whose likeliest token is always the next of `text` [n]."""

    def __init__(self, runner: Runner, text: Tensor) -> None:
        self._runner = runner
        self._text = text
        self.kind = runner.kind
        self.device = runner.device

    @property
    def length(self) -> int:
        return self._runner.length

    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        logits = self._runner.feed(ids, parents, rows=rows)
        end = self._runner.length + 1
        return logits.scatter(1, self._text[end - len(logits) : end, None], CERTAIN)

    def truncate(self, length: int) -> None:
        self._runner.truncate(length)

    def keep(self, path: Sequence[int]) -> None:
        self._runner.keep(path)


class ScriptedDrafter:
    """Drafts with a runner's passes, one by one as `ModelDrafter` does; each token is right with chance `alpha`."""

    def __init__(self, runner: Runner, text: Tensor, alpha: float, vocab_size: int) -> None:
        self.runner = self.cache = runner
        self._right = text
        self._wrong = (text + 1) % vocab_size
        self._alpha = alpha

    def prefill(self, context: list[int], stop: Stop) -> float:
        return prefill(self.runner, context, stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        fresh = ids_on(self.runner.device, context[self.runner.length :])
        tokens: list[Tensor] = []
        for at in range(len(context), len(context) + length):
            favourite = self.runner.feed(fresh, rows=1).argmax(-1)  # what greedy drafting would take
            hit = uniforms[at - len(context), None] < self._alpha
            fresh = torch.where(hit, self._right[at, None], self._wrong[at, None]) + 0 * favourite
            tokens.append(fresh)
        return Draft(torch.cat(tokens))

    def truncate(self, length: int) -> None:
        self.runner.truncate(length)

    def reset(self) -> None:
        self.runner.truncate(0)
