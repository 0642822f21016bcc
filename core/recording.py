"""From a step's raw numbers to the round that is shown, exported and replayed. Outside every clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.drafting import Draft
from core.records import Candidate, Outcome, Round, Token
from core.sampling import Sampling
from core.text import Detokenizer


@dataclass(slots=True)
class Step:
    """What one round produced, on the host but for the logits.

    `path`: indices of the accepted drafted tokens in order; `rejected`: of those judged and refused; `token` follows
    the path, with its outcome. `p`, `q`, `draws` are per drafted token (draws empty where nothing is drawn: greedy).
    logits [k+1, vocab]: row 0 is the target's after the context, row i+1 after drafted token i.
    """

    draft: Draft
    logits: Tensor
    drafted: list[int]
    path: list[int]
    rejected: list[int]
    token: int
    outcome: Outcome
    p: list[float]
    q: list[float]
    token_p: float
    draws: list[float | None] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0


def record(
    step: Step, index: int, sampling: Sampling, text: Detokenizer, stop_ids: frozenset[int], tops: int = 0
) -> Round:
    """Name every token's outcome and text; commit the kept ones to `text`. What lies past a stop id is ignored."""
    parents = _parents(step)
    cut = next((n + 1 for n, i in enumerate(step.path) if step.drafted[i] in stop_ids), None)
    path = step.path[:cut]
    texts = text.peek(step.drafted, parents)
    drafted = [
        Token(
            id=token_id,
            text=texts[i],
            outcome="accepted" if i in path else "rejected" if i in step.rejected and cut is None else "ignored",
            p=step.p[i],
            q=step.q[i],
            parent=parents[i],
        )
        for i, token_id in enumerate(step.drafted)
    ]
    for token, drawn in zip(drafted, step.draws):
        token.draw = drawn if token.outcome != "ignored" else None
    for i in path:
        text.push(step.drafted[i])
    emitted = None
    if cut is None:
        emitted = Token(step.token, text.push(step.token), step.outcome, p=step.token_p)
    round_ = Round(index, drafted, emitted, step.draft_seconds, step.verify_seconds, step.other_seconds)
    if tops:
        _add_tops(round_, step, sampling, text, tops)
    return round_


def _parents(step: Step) -> list[int | None]:
    if step.draft.parents is not None:
        return [None if parent < 0 else parent for parent in step.draft.parents]
    return [i - 1 if i else None for i in range(len(step.drafted))]


def _add_tops(round_: Round, step: Step, sampling: Sampling, text: Detokenizer, count: int) -> None:
    """What target and drafter would rather have said: after the chain, or plain softmax where the chain is greedy."""

    def top(rows: Tensor) -> list[list[Candidate]]:
        probs = rows.float().softmax(-1) if sampling.greedy else sampling.probabilities(rows)
        values, ids = probs.topk(min(count, probs.shape[-1]), dim=-1)
        return [
            [Candidate(i, text.alone(i), p) for i, p in zip(row_ids, row_p) if p > 0]
            for row_ids, row_p in zip(ids.tolist(), values.tolist())
        ]

    target = top(step.logits)
    drafter = top(torch.cat(step.draft.logits)) if step.draft.logits else None
    for i, token in enumerate(round_.drafted):
        token.top_target = target[0 if token.parent is None else token.parent + 1]
        token.top_draft = drafter[i] if drafter else None
    if round_.emitted:
        round_.emitted.top_target = target[step.path[-1] + 1 if step.path else 0]
