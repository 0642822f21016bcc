"""How a block drafter learns: many blocks of a text in one pass, each seeing the text before its anchor and itself.

Anchors are drawn anew every time among the rows that count; what a block sees and is asked for does not hang on which
others are drawn (`core.heads.dflash.DFlashNetwork.blocks`). Token k of a block weighs exp(-k / γ). DSpark's tokens are
told the true one before them, its loss is 0.1 · CE + 0.9 · Σ|p - q|, and its confidence learns what would be accepted
at temperature 1, Σ min(p, q) (DeepSpec); DFlash learns by cross-entropy alone (arXiv 2602.06036), here against the
target's distribution.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.heads.dflash import DFlashNetwork
from core.training.pool import Batch

ANCHORS = 64
"""Blocks of a text in a batch, at most."""
GAMMA = 4.0
OVERLAP_SHARE = 0.9
"""Of DSpark's loss; the rest is cross-entropy."""


def weights(drafted: int) -> list[float]:
    return [math.exp(-k / GAMMA) for k in range(drafted)]


def draw_anchors(batch: Batch, most: int, chance: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rows t [B, A] of each text, of those that count, whose next token is a block's anchor; and which of them are
    there (a text with fewer has its last again). Without `chance` they are spread evenly."""
    width = batch.features.shape[1]
    drawn = []
    for counted in batch.counted[:, :width].cpu():
        rows = counted.nonzero()[:, 0]
        if len(rows) > most:
            even = torch.arange(most) * len(rows) // most
            rows = rows[even if chance is None else torch.randperm(len(rows), generator=chance)[:most].sort().values]
        drawn.append(rows)
    count = max(map(len, drawn))
    rows = torch.stack([F.pad(each, (0, count - len(each)), value=int(each[-1]) if len(each) else 0) for each in drawn])
    there = torch.arange(count) < torch.tensor([len(each) for each in drawn])[:, None]
    return rows.to(batch.tokens.device), there.to(batch.tokens.device)


class Blocks(nn.Module):
    """What blocks draft from: for each token k of theirs hidden states, with the latents of the bias behind them where
    there is one; and the log-odds of the confidence head."""

    def __init__(self, head: DFlashNetwork) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, embedding: Tensor, batch: Batch, rows: Tensor, there: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For each k [n_k, width] states, [n_k] flat rows (`of_step` counts from them), [n_k] log-odds or empty."""
        head, config = self.head, self.head.config
        width, drafted = batch.features.shape[1], config.drafted
        ids = F.pad(batch.tokens[:, :width], (1, 0))  # no anchor stands at the beginning of a text
        features = F.pad(batch.features.to(embedding.dtype), (0, 0, 0, 1))
        hidden = head.blocks(lambda tokens: F.embedding(tokens, embedding), ids, features, rows + 1)
        hidden = hidden[:, :, config.first :]
        ahead = rows[..., None] + torch.arange(drafted, device=rows.device)
        previous = batch.tokens.gather(1, ahead.flatten(1)).view(ahead.shape)
        sure = head.confidence(hidden, previous) if config.confidence else hidden.new_zeros(*ahead.shape)
        if head.markov_head is not None:
            hidden = torch.cat([hidden, head.markov_head(hidden, previous)], -1)
        counted = batch.counted.gather(1, ahead.flatten(1)).view(ahead.shape) & there[..., None]
        flat = rows + torch.arange(len(rows), device=rows.device)[:, None] * width
        states, of, odds = [], [], []
        for k in range(drafted):
            here = counted[..., k]
            states.append(hidden[:, :, k][here])
            of.append(flat[here])
            odds.append(sure[..., k][here])
        return states, of, odds
