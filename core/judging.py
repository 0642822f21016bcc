"""Between the target's logits and the rule of `core.verification`: a path per kind of draft, one transfer each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor

from core.drafting import Draft
from core.errors import UserError
from core.recording import Step
from core.records import Outcome
from core.runner import ids_on
from core.sampling import Sampling
from core.verification import verify_chain, verify_greedy, verify_tree


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
