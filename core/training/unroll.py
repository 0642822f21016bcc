"""The loss of a head that drafts several tokens: each recurrent step learns on what the step before it gave.

Step i of row t reads the true token t + 1 + i and the head's own output of step i - 1, and looks at the first-pass rows
up to t and at its own chain: what it will see when it drafts (EAGLE-3's training-time test, arXiv 2503.01840).
The loss of a step is the cross-entropy against the target's distribution over the draft vocabulary; step i weighs
0.8**i.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from core.heads import HeadNetwork, repeat
from core.training.pool import Batch

STEPS = 3
"""Passes unrolled: drafts of more tokens run the last of them on."""
STEP_WEIGHT = 0.8
MATRIX_RATE, OTHER_RATE = 0.03, 1e-3
AVERAGE = 0.999
"""Kept of the running average at a step, once there were steps enough."""


class Unroll(nn.Module):
    """The outputs of the first pass and of `steps` - 1 recurrent ones, normed, at the rows that count."""

    def __init__(self, head: HeadNetwork) -> None:
        super().__init__()
        self.head = head

    def forward(self, embedding: Tensor, batch: Batch, steps: int) -> list[Tensor]:
        """[rows of step i, hidden] for each step; `embedding` is the target's table. Rows before `first`, the beginning
        that all texts share, are keys and values of the first pass alone."""
        head = self.head
        width, first = batch.features.shape[1], batch.first
        embedded = F.embedding(batch.tokens, embedding)
        inputs = head.join(batch.features.to(embedding.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for i in range(steps):
            begin = first if i else 0
            at = torch.arange(begin + i, i + width, device=inputs.device)
            residual, q, k, v = head.project(embedded[:, begin + i : i + width], inputs, at)
            group = q.shape[1] // k.shape[1]
            keys.append(repeat(k, group))
            values.append(repeat(v, group))
            if not i:
                residual, q = residual[:, first:], q[:, :, first:]
            hidden = head.finish(residual, attend(q, keys, values))
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


class CrossEntropy(torch.autograd.Function):
    """Mean over rows of -Σ p log q, q the softmax of hidden @ weight.T, p given at few ids. Its gradient is the softmax
    with p taken off, made in place: a batch times a vocabulary is the largest thing in training, and passes over it
    cost more than the matrix products."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        q = (hidden @ weight.t()).softmax(-1)
        scale = 1 / max(len(hidden), 1)
        loss = -(p * q.gather(1, ids).to(p.dtype).clamp(min=1e-30).log()).sum() * scale
        gradient = q.mul_(p.sum(-1, keepdim=True).to(q.dtype))
        gradient.scatter_add_(1, ids, -p.to(q.dtype))
        ctx.save_for_backward((gradient @ weight) * scale, (gradient.t() @ hidden) * scale)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        return hidden * grads[0], weight * grads[0], None, None


def loss_of(head: HeadNetwork, embedding: Tensor, batch: Batch, steps: int) -> tuple[Tensor, float]:
    """The unrolled loss, and that of the first step alone. The head computes in the embedding's precision, the
    gradients arrive at its own parameters."""
    parameters = {f"head.{name}": p.to(embedding.dtype) for name, p in head.named_parameters()}
    outputs = functional_call(Unroll(head), parameters, (embedding, batch, steps))
    losses = []
    for i, hidden in enumerate(outputs):
        rows = rows_that_count(batch, i)
        ids, p = of_step(batch.teacher, batch, i, rows), of_step(batch.probs, batch, i, rows)
        losses.append(CrossEntropy.apply(hidden, parameters["head.lm_head.weight"], ids, p))
    weights = [STEP_WEIGHT**i for i in range(steps)]
    total = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
    return total, float(losses[0].detach())  # type: ignore[return-value]


@torch.no_grad()
def agreements(
    head: HeadNetwork, embedding: Tensor, batches: Iterator[Batch], steps: int
) -> Iterator[tuple[list[float], float]]:
    """Greedy, teacher-forced: the share of rows where the first i + 1 drafted tokens are all the target's likeliest,
    for each i; and Σ min(p, q) at the first, which is what is accepted at temperature 1. Of the batches so far, after
    each."""
    parameters = {f"head.{name}": p.to(embedding.dtype) for name, p in head.named_parameters()}
    draft_ids = head.draft_ids
    hits, overlap, rows_seen = [0] * steps, 0.0, 0
    for batch in batches:
        outputs = functional_call(Unroll(head), parameters, (embedding, batch, steps))
        alive = batch.counted[:, : batch.features.shape[1]].flatten().clone()
        rows_seen += int(alive.sum())
        for i, hidden in enumerate(outputs):
            rows = rows_that_count(batch, i)
            logits = hidden @ parameters["head.lm_head.weight"].t()
            right = torch.zeros_like(alive)
            right[rows] = draft_ids[logits.argmax(-1)] == of_step(batch.best, batch, i, rows)
            alive &= right
            hits[i] += int(alive.sum())
            if i == 0:
                q = logits.float().softmax(-1).gather(1, of_step(batch.teacher, batch, 0, rows))
                overlap += float(torch.minimum(q, of_step(batch.probs, batch, 0, rows)).sum())
        yield [hit / max(rows_seen, 1) for hit in hits], overlap / max(rows_seen, 1)


class Learner:
    """A head, its running average and its optimisers: Muon for the matrices of the block, AdamW for the rest."""

    def __init__(self, head: HeadNetwork) -> None:
        self.head, self.average = head, copy.deepcopy(head)
        matrices = [p for n, p in head.named_parameters() if p.dim() == 2 and n.startswith(("fc.", "midlayer."))]
        of_matrices = set(map(id, matrices))
        others = [p for p in head.parameters() if id(p) not in of_matrices]
        self._optimisers = [
            torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._steps = 0

    def learn(self, embedding: Tensor, batch: Batch, share: float) -> float:
        """Add to the gradients what a batch says that has this share of a step's rows; so much of the loss of its first
        pass."""
        loss, first = loss_of(self.head, embedding, batch, STEPS)
        (loss * share).backward()
        return first * share

    def step(self, rate: float) -> None:
        """One step at this share of the full rates."""
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimiser, full in zip(self._optimisers, (MATRIX_RATE, OTHER_RATE)):
            for group in optimiser.param_groups:
                group["lr"] = full * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._steps += 1
        kept = min(AVERAGE, self._steps / (self._steps + 9))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.head.parameters()):
                mean.lerp_(new, 1 - kept)

    def state_dict(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        self._steps = state["steps"]
