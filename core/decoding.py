"""The loop of rounds, and one round: propose, run the target once, judge, keep what stands, roll back, record.

All of it works on token ids; a lane (`core.lanes`) turns them into text. Clocks see engine work only: recording, and
whatever the caller does between rounds, is outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.drafting import Draft, Drafter
from core.drafting.chain import confidence_of
from core.drafting.length import Controller, Growing
from core.errors import Cancelled
from core.progress import Stop, never
from core.records import CacheLengths, Candidate, Round, Run, Token
from core.runners import PREFILL_CHUNK, Runner, favourites_of, prefill
from core.runners.clock import Clock, engine_time
from core.runners.host import ids_on
from core.sampling import Sampling, Uniforms
from core.verification import Verdict, judge


def speculative(
    target: Runner,
    drafter: Drafter | None,
    run: Run,
    *,
    length: Controller,
    stop_ids: frozenset[int] = frozenset(),
    stop: Stop = never,
    tops: int = 0,
) -> Iterator[Round]:
    """Continue run.prompt_ids until a stop id, run.settings.max_new_tokens or `stop()`; fills `run` as it goes.

    Without a drafter every round is a plain step. `tops` > 0 records that many of the likeliest tokens of target and
    drafter at every position. Texts are left empty.
    """
    settings = run.settings
    sampling = Sampling.of(settings)
    numbers = Uniforms(settings.seed, target.device)
    context = list(run.prompt_ids)
    try:
        whole = len(context) - 1
        # A head reads its target's hidden states chunk by chunk behind it, so that those of a long prompt are never all
        # there at once; other drafters read on their own.
        step = PREFILL_CHUNK if getattr(drafter, "in_step", False) else max(1, whole)
        for end in (*range(step, whole, step), whole):
            run.prefill_seconds += prefill(target, context[:end], stop)
            if drafter is not None:
                run.draft_prefill_seconds += drafter.prefill(context[:end], stop)
        while run.stop_reason is None:
            if stop():
                raise Cancelled
            # One token of every round is the target's own: a draft longer than this could not be used.
            useful = settings.max_new_tokens - len(run.token_ids) - 1
            if isinstance(length, Growing):
                length.settle(target.length)
            choosing = engine_time()  # the engine's work too, as is learning from the outcome
            gamma = min(length.next(context), useful) if drafter is not None else 0
            choosing = engine_time() - choosing
            step = take_step(target, drafter, context, gamma, sampling, numbers)
            round_ = record(step, len(run.rounds), sampling, stop_ids, tops)
            learning = engine_time()
            length.observe(round_)
            round_.other_seconds += choosing + engine_time() - learning
            kept = [token.id for token in round_.kept]
            context += kept
            run.token_ids += kept
            run.rounds.append(round_)
            if kept[-1] in stop_ids:
                run.stop_reason = "eos"
            elif len(run.token_ids) >= settings.max_new_tokens:
                run.stop_reason = "length"
            yield round_
    except (Cancelled, GeneratorExit):
        run.stop_reason = run.stop_reason or "cancelled"


@dataclass(slots=True)
class Step:
    """What one round did. `gamma` is the depth asked of the drafter. logits [k+1, vocab]: row 0 is the target's
    after the context, row i+1 after drafted token i. `draft_cache` is None where the drafter has no cache of its own.
    Times in seconds of engine time."""

    gamma: int
    draft: Draft
    logits: Tensor
    verdict: Verdict
    target_cache: CacheLengths
    draft_cache: CacheLengths | None
    draft_seconds: float
    verify_seconds: float
    other_seconds: float

    @property
    def kept(self) -> list[int]:
        """The ids this round adds to the text: the accepted ones and the token that follows them."""
        return [*(self.verdict.drafted[i] for i in self.verdict.path), self.verdict.token]


@torch.inference_mode()
def take_step(
    target: Runner,
    drafter: Drafter | None,
    context: list[int],
    gamma: int,
    sampling: Sampling,
    numbers: Uniforms,
) -> Step:
    """Propose up to `gamma` deep, judge with one target pass, and roll both caches back to what stands."""
    clock = Clock(target.device)
    cache = drafter.cache if drafter else None
    held, draft_held = target.length, cache.length if cache else 0
    for_drafting, for_judging = numbers.of_next_round()
    draft = drafter.propose(context, gamma, for_drafting) if drafter and gamma else Draft.none(target.device)
    draft_fullest = cache.length if cache else 0
    clock.mark()
    fresh = ids_on(target.device, context[held:])
    parents = None if draft.parents is None else _below(len(fresh), draft.parents)
    ids = torch.cat([fresh, draft.tokens]) if len(draft) else fresh
    logits = target.feed(ids, parents, rows=len(draft) + 1)
    clock.mark()
    verdict = judge(logits, draft, sampling, for_judging, favourites_of(target))
    if parents is not None:
        target.keep([*range(len(fresh)), *(len(fresh) + i for i in verdict.path)])
    stands = len(context) + len(verdict.path)
    target.truncate(stands)
    if drafter is not None:
        drafter.truncate(stands)
    target_cache = CacheLengths(held, held + len(ids), target.length)
    draft_cache = CacheLengths(draft_held, draft_fullest, cache.length) if cache else None
    (drafting, verifying), total = clock.stop()
    rest = max(0.0, total - drafting - verifying)
    return Step(gamma, draft, logits, verdict, target_cache, draft_cache, drafting, verifying, rest)


def _below(fresh: int, parents: list[int]) -> list[int]:
    """Parents of a tree fed right after `fresh` tokens of text, the last of which is its root."""
    return [*range(-1, fresh - 1), *(fresh + parent for parent in parents)]


def record(step: Step, index: int, sampling: Sampling, stop_ids: frozenset[int], tops: int = 0) -> Round:
    """Name every token's outcome. What lies past a stop id is ignored; texts are left empty."""
    verdict, parents = step.verdict, _parents(step.draft)
    cut = next((n + 1 for n, i in enumerate(verdict.path) if verdict.drafted[i] in stop_ids), None)
    path = verdict.path[:cut]
    refused = [i for i in verdict.rejected if cut is None or i < path[-1]]
    drafted = [
        Token(
            id=token_id,
            text="",
            outcome="accepted" if i in path else "rejected" if i in refused else "ignored",
            p=verdict.p[i],
            q=verdict.q[i],
            parent=parents[i],
        )
        for i, token_id in enumerate(verdict.drafted)
    ]
    for token, drawn in zip(drafted, verdict.draws):
        token.draw = drawn if token.outcome != "ignored" else None
    emitted = Token(verdict.token, "", verdict.outcome, p=verdict.token_p) if cut is None else None
    seconds = step.draft_seconds, step.verify_seconds, step.other_seconds
    shape = "x".join(map(str, step.draft.shape)) if step.draft.shape else None
    asked = step.gamma, shape, step.draft.source, step.draft.ended, step.draft.refused
    for token, confidence in zip(drafted, _confidences(step.draft, bool(tops))):
        token.confidence = confidence
    round_ = Round(index, drafted, emitted, *seconds, step.target_cache, step.draft_cache, *asked)
    if tops:
        _record_tops(round_, step, sampling, tops)
    return round_


def _confidences(draft: Draft, shown: bool) -> list[float]:
    """How sure the drafter was of each token of a chain. Where the draft did not depend on it, it is asked here, of a
    device only where more is `shown` that the host waits for."""
    if draft.confidences is not None:
        return draft.confidences
    if draft.parents is not None or not draft.logits or not (shown or draft.tokens.is_cpu):
        return []
    return confidence_of(torch.cat(draft.logits), draft.probs).tolist()


def _parents(draft: Draft) -> list[int | None]:
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    return [None if parent < 0 else parent for parent in parents]


def _record_tops(round_: Round, step: Step, sampling: Sampling, count: int) -> None:
    """What target and drafter would rather have said at every position."""

    def top(logits: Tensor, columns: Tensor | None = None) -> list[list[Candidate]]:
        rows = sampling.favourites(logits, count)
        names = range(logits.shape[-1]) if columns is None else columns.tolist()
        return [[Candidate(names[i], "", p) for i, p in row] for row in rows]

    target = top(step.logits)
    drafter = top(torch.cat(step.draft.logits), step.draft.ids) if step.draft.logits else None
    for i, token in enumerate(round_.drafted):
        token.top_target = target[0 if token.parent is None else token.parent + 1]
        token.top_draft = drafter[i] if drafter else None
    if round_.emitted:
        round_.emitted.top_target = target[step.verdict.path[-1] + 1 if step.verdict.path else 0]
