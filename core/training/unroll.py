"""How an EAGLE-3 head learns to draft several tokens: each recurrent step learns on what the step before it gave.

Step i of row t reads the true token t + 1 + i and the head's own output of step i - 1, and looks at the first-pass rows
up to t and at its own chain: what it will see when it drafts (EAGLE-3's training-time test, arXiv 2503.01840).
The loss of a step is the cross-entropy against the target's distribution over the draft vocabulary; step i weighs
0.8**i.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.heads import HeadNetwork, repeat
from core.training.pool import Batch

STEPS = 3
"""Passes unrolled: drafts of more tokens run the last of them on."""
STEP_WEIGHT = 0.8


class Unroll(nn.Module):
    """The outputs of the first pass and of recurrent ones, normed, at the rows that count."""

    def __init__(self, head: HeadNetwork) -> None:
        super().__init__()
        self.head = head

    def forward(self, embedding: Tensor, batch: Batch, steps: int) -> list[Tensor]:
        """[rows of step i, hidden] for each step; `embedding` is the target's table. Of the last layer, rows before
        `first`, the beginning that all texts share, are keys and values of the first pass alone."""
        head = self.head
        width, first = batch.features.shape[1], batch.first
        layers = head.stack
        embedded = F.embedding(batch.tokens, embedding)
        inputs = head.join(batch.features.to(embedding.dtype))
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        outputs = []
        for i in range(steps):
            begin = first if i else 0
            at = torch.arange(begin + i, i + width, device=inputs.device)
            hidden, q, k, v = head.project(embedded[:, begin + i : i + width], inputs, at)
            for depth, layer in enumerate(layers):
                if depth:
                    q, k, v = head.project_further(depth, hidden, at)
                if not i and layer is layers[-1]:
                    hidden, q = hidden[:, first:], q[:, :, first:]
                group = q.shape[1] // k.shape[1]
                keys[depth].append(repeat(k, group))
                values[depth].append(repeat(v, group))
                hidden = layer.finish(hidden, attend(q, keys[depth], values[depth]))
            rows = (batch.counted[:, first + i : i + width] & batch.counted[:, first:width]).flatten().nonzero()[:, 0]
            outputs.append(head.norm(hidden.flatten(0, 1)[rows]))
            inputs = head.feed_back(hidden)
        return outputs


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last rows of a text, queries [B, heads, n, d]: to the rows of the first pass, keys[0] [B, heads,
    m, d], up to their own, and of each later pass [B, heads, n, d] to their own alone, which is what a row and its
    chain have before them."""
    n, m = q.shape[2], keys[0].shape[2]
    scores = q @ keys[0].transpose(-1, -2)
    seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    scores = scores.masked_fill(~seen, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = (torch.cat([scores, *own], -1) * q.shape[-1] ** -0.5).softmax(-1)
    attended = weights[..., :m] @ values[0]
    for j, v in enumerate(values[1:]):
        attended = attended + weights[..., m + j, None] * v
    return attended


def rows_that_count(batch: Batch, step: int) -> Tensor:
    """Indices into the flattened [B · T] rows whose step predicts a token of the answer, as did the steps before."""
    width = batch.features.shape[1]
    return (batch.counted[:, step : step + width] & batch.counted[:, :width]).flatten().nonzero()[:, 0]


def of_step(values: Tensor, batch: Batch, step: int, rows: Tensor) -> Tensor:
    """What `values` [B, T + steps, …] says of the rows of a step."""
    return values[:, step : step + batch.features.shape[1]].flatten(0, 1)[rows]
