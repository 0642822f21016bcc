"""Drafting with a smaller model, or with the early-exit view of the target: both are runners."""

from __future__ import annotations

import torch
from torch import Tensor

from core.drafting import Draft
from core.prefill import prefill
from core.progress import Stop
from core.runner import Runner, ids_on
from core.sampling import Sampling, draw


class ModelDrafter:
    """Draws a chain of tokens one by one from a runner, through the same sampler chain as the target.

    `limit`: how many tokens fit in the draft's context; a longer text goes on without it.
    """

    def __init__(self, runner: Runner, sampling: Sampling, limit: int | None = None) -> None:
        self.runner = runner
        self._sampling = sampling
        self._limit = limit

    def size(self, length: int) -> int:
        return length

    def prefill(self, context: list[int], stop: Stop) -> float:
        return prefill(self.runner, context[: self._limit], stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        if self._limit is not None:
            length = min(length, self._limit - len(context) + 1)  # the last drafted token is not fed
        if length < 1:
            return Draft.none(self.runner.device)
        fresh = ids_on(self.runner.device, context[self.runner.length :])
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        while len(tokens) < length:
            row = self.runner.feed(fresh, rows=1)
            if self._sampling.greedy:
                fresh = row.max(-1).indices  # on a CPU several times as fast as argmax
            else:
                q = self._sampling.probabilities(row)
                fresh = draw(q, uniforms[len(tokens) : len(tokens) + 1])
                probs.append(q)
            tokens.append(fresh)
            logits.append(row)
        return Draft(torch.cat(tokens), torch.cat(probs) if probs else None, logits=logits)

    def truncate(self, length: int) -> None:
        self.runner.truncate(length)

    def reset(self) -> None:
        self.runner.truncate(0)
