"""The sampler chain: logits -> probabilities; the same for target and draft, in the order temperature, k, p, min-p.

Verification compares the distributions *after* this chain, so whatever is drawn must be drawn from what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from core.settings import SPECS, Settings

COLDEST = 1e-30
"""Temperatures below are taken as this: already one-hot, and logits divided by it are still finite."""
HIGHEST = 1 - 2**-24
"""The largest float32 below 1."""
MOST_DRAFTED = 128
"""Tokens a round may draft at most."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their step off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            SPECS[each.name].read(getattr(self, each.name))

    @classmethod
    def of(cls, settings: Settings) -> Sampling:
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Apply the chain: logits [..., vocab] of any float type -> probabilities [..., vocab] in float32."""
        if self.greedy:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.temperature != 1:
            logits = logits.float() / max(self.temperature, COLDEST)
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            logits = _keep_nucleus(logits, self.top_p)
        if self.min_p > 0:
            probs = logits.softmax(-1, dtype=torch.float32)
            logits = logits.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return logits.softmax(-1, dtype=torch.float32)

    def choose(self, row: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of a row of logits [1, vocab] the token that is drawn [1], and the law it was drawn from [1, vocab]; None: it
        is the likeliest."""
        if self.greedy:
            return likeliest(row)[1], None
        q = self.probabilities(row)
        return draw(q, uniform), q

    def favourites(self, logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
        """The `count` likeliest tokens of each row of logits [n, vocab] with their probabilities, possible ones only:
        after the chain, or of a plain softmax where the chain is greedy."""
        probs = logits.float().softmax(-1) if self.greedy else self.probabilities(logits)
        values, ids = probs.topk(min(count, probs.shape[-1]), dim=-1)
        return [[(i, p) for i, p in zip(*row) if p > 0] for row in zip(ids.tolist(), values.tolist())]


def likeliest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number [n] of each row [n, vocab], NaN before all, and its index [n], the first of equal ones."""
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        values, indices = rows.max(-1)
        return values, indices
    indices = torch.from_numpy(rows.numpy().argmax(-1))  # in a tenth of PyTorch's time
    return rows.gather(-1, indices[:, None])[:, 0], indices


def _keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al. 2019)."""
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1, dtype=torch.float32)
    before = probs.cumsum(-1) - probs
    past = before >= max(top_p, torch.finfo(torch.float32).tiny)  # less would be 0, and the likeliest be past it
    drop = past.scatter(-1, order, past)
    return logits.masked_fill(drop, -torch.inf)


class Uniforms:
    """The random numbers of a seed, float32 in [0, 1): as many for every round, whatever its draft takes of them, so
    that a round's depend on nothing but the seed and how many rounds came before. Made for several rounds at once:
    making them costs a round as much as sampling a token."""

    ROUNDS = 16

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._left: list[tuple[Tensor, Tensor]] = []

    def of_next_round(self) -> tuple[Tensor, Tensor]:
        """The drafter's [MOST_DRAFTED], and the judge's [MOST_DRAFTED + 1]."""
        if not self._left:
            shape = self.ROUNDS, 2 * MOST_DRAFTED + 1
            block = torch.rand(shape, generator=self._generator, device=self._generator.device, dtype=torch.float32)
            block.clamp_(max=HIGHEST)  # where a device rounds up to 1
            self._left = list(zip(block[:, :MOST_DRAFTED].unbind(), block[:, MOST_DRAFTED:].unbind()))[::-1]
        return self._left.pop()


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative distribution.

    probs [..., vocab] need not sum to one; uniform [...] in [0, 1). Returns int64 [...]. Never draws what has
    probability zero, whatever the rounding.
    """
    # A parallel sum in float32 may not be monotone to the last bit; in float64 that is out of reach.
    cumulative = probs.cumsum(-1, dtype=torch.float64 if probs.is_cuda else None)
    # HIGHEST times a normal total rounds to less than the total: where the sum first exceeds the product, it grows, so
    # that token's probability is not zero.
    sought = uniform.unsqueeze(-1) * cumulative.narrow(-1, -1, 1)
    reached = torch.searchsorted(cumulative, sought, right=True).squeeze(-1)
    # A law that is not a number is refused by the judge; until then its index must at least exist.
    return reached.clamp_(max=probs.shape[-1] - 1)
