"""One round: propose, run the target once, judge, roll back."""

from __future__ import annotations

import torch

from core.clock import Clock
from core.drafting import Draft, Drafter
from core.judging import judge
from core.recording import Step
from core.runner import Runner, ids_on
from core.sampling import Sampling, Uniforms


@torch.inference_mode()
def take_step(
    target: Runner,
    drafter: Drafter | None,
    context: list[int],
    gamma: int,
    sampling: Sampling,
    numbers: Uniforms,
) -> Step:
    """Propose up to `gamma` deep, judge with one target pass, and roll both caches back to what stands.

    The round's uniform numbers are taken up front: the first half for the drafter, the rest for the judge.
    """
    clock = Clock(target.device)
    size = drafter.size(gamma) if drafter else 0
    uniforms = numbers.take(2 * size + 1)
    draft = drafter.propose(context, gamma, uniforms[:size]) if drafter else Draft.none(target.device)
    clock.mark()
    fresh = ids_on(target.device, context[target.length :])
    parents = None if draft.parents is None else _below(len(fresh), draft.parents)
    ids = torch.cat([fresh, draft.tokens]) if len(draft) else fresh
    logits = target.feed(ids, parents, rows=len(draft) + 1)
    clock.mark()
    step = judge(logits, draft, sampling, uniforms[size:])
    if parents is not None:
        target.keep([*range(len(fresh)), *(len(fresh) + i for i in step.path)])
    stands = len(context) + len(step.path)
    target.truncate(stands)
    if drafter is not None:
        drafter.truncate(stands)
    (step.draft_seconds, step.verify_seconds), total = clock.stop()
    step.other_seconds = max(0.0, total - step.draft_seconds - step.verify_seconds)
    return step


def _below(fresh: int, parents: list[int]) -> list[int]:
    """Parents of a tree fed right after `fresh` tokens of text, the last of which is its root."""
    return [*range(-1, fresh - 1), *(fresh + parent for parent in parents)]
