"""Drafting with a trained head (EAGLE-3): one layer that reads the target's hidden states.

Row t of the head's cache pairs the target's features of token t with token t + 1. The features of a round's tokens come
with the verification pass itself, so reading the newest ones also gives the next round's first proposal; behind it, the
head goes on from its own output, row by row, and those rows are dropped after the round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.clock import engine_time, synchronise
from core.drafting import Draft
from core.errors import Cancelled
from core.heads.runner import HeadRunner
from core.progress import Stop
from core.runners import PREFILL_CHUNK, Runner
from core.runners.features import Features
from core.runners.host import ids_on
from core.sampling import Sampling, draw


class HeadReader:
    """Keeps a head's cache in step with its target: what both ways of drafting share.

    `features` are those of the target's runner, which rolls them back with its cache. Its cache is of rows, not of the
    target's tokens.
    """

    cache: Runner | None = None

    def __init__(self, runner: HeadRunner, features: Features, sampling: Sampling) -> None:
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
        # A row needs the token after its own.
        self.runner.truncate(max(0, min(self._stable, length - 1 - self._begins)))
        if self.runner.length < self._stable:
            self._stable, self._output = self.runner.length, None

    def reset(self) -> None:
        self._begins, self._output = self._features.start, None
        self._stable = 0
        self.runner.truncate(0)

    def _refresh(self, context: list[int]) -> Tensor | None:
        """The head's output [1, hidden] after the committed text, having read the features that are new; None where
        the target has not fed all of it but the newest token."""
        self.runner.truncate(self._stable)
        end = len(context) - 1
        if self._features.end < end:
            return None
        if self._features.start < end:
            self._read(context, end)
        return self._output

    def _read(self, context: list[int], end: int) -> None:
        """Read the features of the tokens before position `end`."""
        start = self._features.start
        if start != self._begins + self.runner.length:  # text was taken back further than rows can be read again
            self._begins = start
            self.runner.truncate(0)
        ids = ids_on(self.runner.device, context[start + 1 : end + 1])
        self._output = self.runner.read(ids, self._features.take(end))[-1:]
        self._stable = self.runner.length


class HeadDrafter(HeadReader):
    """Draws a chain of tokens one by one, through the same sampler chain as the target.

    A reduced vocabulary's law is zero for every token outside it.
    """

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        head = self.runner.head
        output = self._refresh(context) if length else None
        if output is None:
            return Draft.none(self.runner.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        while True:
            row = head.logits(output)
            if self._sampling.greedy:
                index = row.max(-1).indices
            else:
                q = self._sampling.probabilities(row)
                index = draw(q, uniforms[len(tokens) : len(tokens) + 1])
                probs.append(q)
            tokens.append(head.target_ids[index])
            logits.append(row)
            if len(tokens) == length:
                break
            output = self.runner.draft(tokens[-1], output)
        q = head.on_target(torch.cat(probs), 0.0) if probs else None
        return Draft(torch.cat(tokens), q, logits=logits, ids=head.target_ids)
