"""One round: propose, run the target once, judge, roll back.

Between the target's logits and the rule of `core.verification`: a path per kind of draft, one transfer each.

From a step's raw numbers to the round that is shown, exported and replayed. Outside every clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor

from core.clock import Clock, engine_time
from core.drafting import Draft, Drafter
from core.drafting.length import Controller, Fixed
from core.errors import Cancelled, UserError
from core.progress import Stop, never
from core.records import Candidate, Outcome, Round, Run, Token
from core.runners import Runner, ids_on, prefill
from core.sampling import Sampling, Uniforms
from core.text import Detokenizer
from core.verification import verify_chain, verify_greedy, verify_tree


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


def judge(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Step:
    """Judge a draft of k tokens by the target's logits [k+1, vocab]; uniforms [≥ k+1]."""
    if sampling.greedy:
        return _judge_greedy(logits, draft)
    if draft.parents is not None and len(draft):
        return _judge_tree(logits, draft, draft.parents, sampling, uniforms)
    return _judge_chain(logits, draft, sampling, uniforms)


def _judge_greedy(logits: Tensor, draft: Draft) -> Step:
    k = len(draft)
    best, choices = logits.max(-1)
    largest, chosen, drafted = lists_on_host(best, choices, draft.tokens)
    _check_finite(all(map(isfinite, largest)))
    parents = list(range(-1, k - 1)) if draft.parents is None else draft.parents
    verdict = verify_greedy(chosen, drafted, parents)
    return Step(
        draft=draft,
        logits=logits,
        drafted=drafted,
        path=verdict.path,
        rejected=verdict.rejected,
        token=verdict.token,
        outcome=_outcome(k, verdict.corrected),
        p=[float(chosen[parent + 1] == token) for parent, token in zip(parents, drafted)],
        q=[1.0] * k,
        token_p=1.0,
    )


def _judge_chain(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Step:
    k = len(draft)
    uniforms = uniforms[: k + 1]
    p = sampling.probabilities(logits)
    verdict = verify_chain(p, draft.tokens, draft.probs, uniforms)
    (accepted,), (token,), (token_p,), drafted, p_of, q_of, draws = lists_on_host(
        verdict.accepted, verdict.token, verdict.token_p, draft.tokens, verdict.p, verdict.q, uniforms[:-1]
    )
    # A NaN among a row of logits makes all probabilities of the row NaN, whichever of them is looked at.
    _check_finite(not any(map(isnan, (token_p, *p_of, *q_of))))
    return Step(
        draft=draft,
        logits=logits,
        drafted=drafted,
        path=list(range(accepted)),
        rejected=list(range(accepted, k))[:1],
        token=token,
        outcome=_outcome(k, accepted < k),
        p=p_of,
        q=q_of,
        draws=draws,
        token_p=token_p,
    )


def _judge_tree(logits: Tensor, draft: Draft, parents: list[int], sampling: Sampling, uniforms: Tensor) -> Step:
    k = len(parents)
    law = sampling.probabilities(logits)
    p, ids, uniforms, *laws = on_host(
        law, draft.tokens, uniforms[: k + 1], *([] if draft.probs is None else [draft.probs])
    )
    q = laws[0] if laws else None
    tokens = ids.tolist()
    vocab = p.shape[1]
    p_of = p.take(ids_on(p.device, [(parent + 1) * vocab + token for parent, token in zip(parents, tokens)])).tolist()
    q_of = [1.0] * k if q is None else q.gather(1, ids[:, None])[:, 0].tolist()
    verdict = verify_tree(p, tokens, parents, q, uniforms, draft.replacement)
    token_p = p[verdict.path[-1] + 1 if verdict.path else 0, verdict.token].item()
    _check_finite(not any(map(isnan, [token_p, *p_of])))
    return Step(
        draft=draft,
        logits=logits,
        drafted=tokens,
        path=verdict.path,
        rejected=verdict.rejected,
        token=verdict.token,
        outcome=_outcome(k, verdict.corrected),
        p=p_of,
        q=q_of,
        draws=uniforms[:-1].tolist(),
        token_p=token_p,
    )


def lists_on_host(*vectors: Tensor) -> list[list[Any]]:
    """Numbers [n] and ids [n] as lists. With `on_host`, the round's one synchronisation: all the host needs at once."""
    if all(vector.device.type == "cpu" for vector in vectors):
        return [vector.tolist() for vector in vectors]
    return in_one_transfer(*vectors)


def in_one_transfer(*vectors: Tensor) -> list[list[Any]]:
    """The same by way of one tensor."""
    packed = iter(_pack(vectors).tolist())
    lists = [list(islice(packed, len(vector))) for vector in vectors]
    return [x if vector.is_floating_point() else list(map(int, x)) for x, vector in zip(lists, vectors)]


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the CPU: as they are if there already, else in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    pieces = _pack(tensors).cpu().split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, tensors)]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All values in a row, as float32: exact for ids up to 2**24."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def _outcome(drafted: int, corrected: bool) -> Outcome:
    return "plain" if not drafted else "corrected" if corrected else "bonus"


def _check_finite(finite: bool) -> None:
    if not finite:
        raise UserError(
            "A model returned logits that are not numbers (NaN or infinite), so nothing can be drawn from them; "
            "try another precision (bf16 instead of fp16), or check the weights."
        )


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


def plain(target: Runner, run: Run, text: Detokenizer, **options: Any) -> Iterator[Round]:
    """Decode without drafts: the same loop, one token a round."""
    return speculative(target, None, run, text, length=Fixed(1), **options)


def speculative(
    target: Runner,
    drafter: Drafter | None,
    run: Run,
    text: Detokenizer,
    *,
    length: Controller,
    stop_ids: frozenset[int] = frozenset(),
    stop: Stop = never,
    tops: int = 0,
) -> Iterator[Round]:
    """Continue run.prompt_ids until a stop id, run.settings.max_new_tokens or `stop()`; fills `run` as it goes.

    `tops` > 0 records that many of the likeliest tokens of target and drafter at every position.
    """
    settings = run.settings
    sampling = Sampling.of(settings)
    numbers = Uniforms(settings.seed, target.device)
    context = list(run.prompt_ids)
    try:
        run.prefill_seconds = prefill(target, context[:-1], stop)
        if drafter is not None:
            run.draft_prefill_seconds = drafter.prefill(context[:-1], stop)
        while run.stop_reason is None:
            if stop():
                raise Cancelled
            # One token of every round is the target's own: a draft longer than this could not be used.
            useful = settings.max_new_tokens - len(run.token_ids) - 1
            choosing = engine_time()  # the engine's work too, as is learning from the outcome
            gamma = min(length.next(), useful) if drafter is not None else 0
            choosing = engine_time() - choosing
            step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
            round_ = record(step, len(run.rounds), sampling, text, stop_ids, tops)
            learning = engine_time()
            length.observe(round_)
            round_.other_seconds += choosing + engine_time() - learning
            kept = [token.id for token in round_.kept]
            context += kept
            run.token_ids += kept
            run.rounds.append(round_)
            run.text += text.visible(round_.kept)
            if kept[-1] in stop_ids:
                run.stop_reason = "eos"
            elif len(run.token_ids) >= settings.max_new_tokens:
                run.stop_reason = "length"
            yield round_
    except (Cancelled, GeneratorExit):
        run.stop_reason = run.stop_reason or "cancelled"
