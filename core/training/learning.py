"""What a head of any kind learns by: the loss of its drafts, how many of them are right, its optimisers.

A kind says what its tokens are drafted from, step by step (`core.training.unroll`, `core.training.blocks`); here that
is held against what the target knew.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from core.heads import HeadNetwork
from core.heads.dflash import DFlashNetwork
from core.training.blocks import ANCHORS, OVERLAP_SHARE, Blocks, draw_anchors, weights
from core.training.pool import Batch
from core.training.unroll import STEP_WEIGHT, STEPS, Unroll, of_step, rows_that_count

Network = HeadNetwork | DFlashNetwork
MATRIX_RATE, OTHER_RATE = 0.03, 1e-3
AVERAGE = 0.999
"""Kept of the running average at a step, once there were steps enough."""
SHOWN_STEPS = 5
"""Positions of a draft whose acceptance is told, at most."""
LOOKED_AT = 32
"""Blocks of a held-out text."""


@dataclass(frozen=True)
class Drafted:
    """The tokens of one step: states [n, width], their rows of the batch, flat, and log-odds of being accepted."""

    states: Tensor
    rows: Tensor
    odds: Tensor | None = None


def positions(head: Network) -> int:
    """Tokens of a draft that are told of."""
    return min(SHOWN_STEPS, head.config.drafted) if isinstance(head, DFlashNetwork) else SHOWN_STEPS


def steps_ahead(head: Network) -> int:
    """How many tokens past a row a batch must know."""
    return head.config.drafted if isinstance(head, DFlashNetwork) else SHOWN_STEPS


def draft(
    head: Network, embedding: Tensor, batch: Batch, steps: int, anchors: int, chance: torch.Generator | None
) -> tuple[list[Drafted], Tensor]:
    """What a head drafts from at each step, teacher-forced, and the table [draft vocabulary, width] whose product with
    it are the logits. The head computes in the embedding's precision, gradients arrive at its own parameters."""
    of_head = {f"head.{name}": p.to(embedding.dtype) for name, p in head.named_parameters()}
    table = of_head["head.lm_head.weight"]
    if not isinstance(head, DFlashNetwork):
        outputs = functional_call(Unroll(head), of_head, (embedding, batch, steps))
        return [Drafted(states, rows_that_count(batch, i)) for i, states in enumerate(outputs)], table
    found = functional_call(Blocks(head), of_head, (embedding, batch, *draw_anchors(batch, anchors, chance)))
    if head.markov_head is not None:
        table = torch.cat([table, of_head["head.markov_head.markov_w2.weight"]], 1)
    return [Drafted(*each) for each in zip(*found)], table


class DraftLoss(torch.autograd.Function):
    """Mean over rows of (1 - s) · -Σ p log q + s · Σ|p - q|, q the softmax of states @ table.T, p given at few ids and
    0 elsewhere; and Σ min(p, q) of each row, without a gradient. Its own is made in place of q: a batch times a
    vocabulary is the largest thing in training, and passes over it cost more than the matrix products."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, ids: Tensor, p: Tensor, s: float) -> tuple[Tensor, Tensor]:
        q = (states @ table.t()).softmax(-1)
        scale = 1 / max(len(states), 1)
        at = q.gather(1, ids).to(p.dtype)
        overlap = torch.minimum(at, p).sum(-1)
        mass = p.sum(-1, keepdim=True)
        loss = -(1 - s) * (p * at.clamp(min=1e-30).log()).sum() + s * (mass[:, 0] + 1 - 2 * overlap).sum()
        # Σ|p - q| = Σp + 1 - 2 Σ min(p, q) grows with q by -2 where q is below p.
        below = torch.where(at < p, at, 0.0)
        gradient = q.mul_(((1 - s) * mass + 2 * s * below.sum(-1, keepdim=True)).to(q.dtype))
        gradient.scatter_add_(1, ids, (-(1 - s) * p - 2 * s * below).to(q.dtype))
        ctx.save_for_backward((gradient @ table) * scale, (gradient.t() @ states) * scale)
        ctx.mark_non_differentiable(overlap)
        return loss * scale, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        states, table = ctx.saved_tensors
        return states * grads[0], table * grads[0], None, None, None


def loss_of(
    head: Network, embedding: Tensor, batch: Batch, steps: int = STEPS, chance: torch.Generator | None = None
) -> tuple[Tensor, float]:
    """The loss of a draft, and that of its first token alone."""
    drafted, table = draft(head, embedding, batch, steps, ANCHORS, chance)
    in_blocks = isinstance(head, DFlashNetwork)
    share = OVERLAP_SHARE if in_blocks and head.config.sample_from_anchor else 0.0
    weigh = weights(len(drafted)) if in_blocks else [STEP_WEIGHT**i for i in range(steps)]
    losses = []
    for i, (each, weight) in enumerate(zip(drafted, weigh)):
        ids, p = of_step(batch.teacher, batch, i, each.rows), of_step(batch.probs, batch, i, each.rows)
        loss, overlap = DraftLoss.apply(each.states, table, ids, p, share)
        if i == 0:
            first = float(loss.detach())
        if in_blocks and head.config.confidence and len(each.rows):
            assert each.odds is not None
            loss = loss + F.binary_cross_entropy_with_logits(each.odds.float(), overlap.float().clamp(0, 1))
        losses.append(weight * loss)
    return sum(losses) / sum(weigh), first  # type: ignore[return-value]


@torch.no_grad()
def agreements(head: Network, embedding: Tensor, batches: Iterator[Batch]) -> Iterator[tuple[list[float], float]]:
    """Greedy, teacher-forced: the share of rows where the first i + 1 drafted tokens are all the target's likeliest,
    for each i, rows whose answer ends before as those that go on; and Σ min(p, q) at the first, which is what is
    accepted at temperature 1. Of the batches so far, after each."""
    count = positions(head)
    hits, judged, overlap = [0] * count, [0] * count, 0.0
    for batch in batches:
        drafted, table = draft(head, embedding, batch, count, LOOKED_AT, None)
        alive = torch.zeros_like(batch.counted[:, : batch.features.shape[1]].flatten())
        alive[drafted[0].rows] = True
        for i, each in enumerate(drafted[:count]):
            logits = each.states @ table.t()
            right = torch.zeros_like(alive)
            judged[i] += int(alive[each.rows].sum())
            right[each.rows] = head.draft_ids[logits.argmax(-1)] == of_step(batch.best, batch, i, each.rows)
            alive &= right
            hits[i] += int(alive.sum())
            if i == 0:
                q = logits.float().softmax(-1).gather(1, of_step(batch.teacher, batch, 0, each.rows))
                overlap += float(torch.minimum(q, of_step(batch.probs, batch, 0, each.rows)).sum())
        shares = (stood / max(of, 1) for stood, of in zip(hits, judged))
        yield list(accumulate(shares, operator.mul)), overlap / max(judged[0], 1)


class Learner:
    """A head, its running average and its optimisers: Muon for the matrices of its layers, AdamW for the rest."""

    def __init__(self, head: Network) -> None:
        self.head, self.average = head, copy.deepcopy(head)
        inner = ("fc.", "midlayer.", "further.", "layers.")
        matrices = [p for name, p in head.named_parameters() if p.dim() == 2 and name.startswith(inner)]
        of_matrices = set(map(id, matrices))
        others = [p for p in head.parameters() if id(p) not in of_matrices]
        self._optimisers = [
            torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._steps = 0

    def learn(self, embedding: Tensor, batch: Batch, share: float, steps: int, chance: torch.Generator | None) -> float:
        """Add to the gradients what a batch says that has this share of a step's rows; so much of the loss of its first
        token. `chance` draws the anchors of blocks."""
        loss, first = loss_of(self.head, embedding, batch, steps, chance)
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
