"""What the pair learns from: the text for the target, the target's own distribution for whatever drafts for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Pair

EXIT = "exit"


def measure_logits(pair: Pair, ids: Tensor, exit_layer: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """ids [batch, tokens] -> the target's logits and each drafter's, [batch * tokens, vocabulary] in `dtype`."""
    early, last = pair.target(ids, (exit_layer,), dtype)
    logits = {EXIT: pair.target.unembed(early).flatten(0, 1)}
    for name, draft in pair.drafts.items():
        logits[name] = draft.unembed(draft(ids, (), dtype)[-1]).flatten(0, 1)
    return pair.target.unembed(last).flatten(0, 1), logits


def compare_with_target(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Means over rows of (cross-entropy against the target's law, total variation = 1 - what acceptance is)."""
    p = F.softmax(target.detach().float(), dim=-1)
    log_q = F.log_softmax(draft.float(), dim=-1)
    return -(p * log_q).sum(-1).mean(), 0.5 * (p - log_q.exp()).abs().sum(-1).mean()


def learn_text(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return F.cross_entropy(logits.float(), labels.flatten())


def score_drafter(target: Tensor, draft: Tensor, labels: Tensor) -> dict[str, float]:
    """Held-out figures of one drafter: nats a token, mean of sum(min(p, q)), share of equal greedy tokens."""
    _, variation = compare_with_target(target, draft)
    agreement = (target.argmax(-1) == draft.argmax(-1)).float().mean()
    return {
        "nats": learn_text(draft, labels).item(),
        "overlap": 1 - variation.item(),
        "agreement": agreement.item(),
    }
