"""Between the target's logits and the rule of `core.verification`: a path per kind of draft, one transfer each."""

from __future__ import annotations

import torch
from torch import Tensor

from core.drafting import Draft
from core.errors import UserError
from core.recording import Step
from core.records import Outcome
from core.sampling import Sampling
from core.verification import TreeVerdict, verify_chain, verify_greedy, verify_tree, verify_tree_greedy


def judge(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Step:
    """Judge a draft of k tokens by the target's logits [k+1, vocab]; uniforms [≥ k+1]."""
    if draft.parents is not None and len(draft):
        return _judge_tree(logits, draft, draft.parents, sampling, uniforms)
    return (_judge_greedy if sampling.greedy else _judge_sampled)(logits, draft, sampling, uniforms)


def _judge_greedy(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Step:
    best, choices = logits.max(-1)
    verdict = verify_greedy(choices, draft.tokens)
    head = torch.stack([best.isfinite().all().long(), verdict.accepted, verdict.token])
    # The round's one synchronisation: everything the host needs, in one transfer.
    packed = torch.cat([head, choices, draft.tokens]).tolist()
    finite, accepted, token = packed[:3]
    chosen, drafted = packed[3 : 4 + len(draft)], packed[4 + len(draft) :]
    _check_finite(bool(finite))
    return Step(
        draft=draft,
        logits=logits,
        drafted=drafted,
        path=list(range(accepted)),
        rejected=list(range(accepted, len(drafted)))[:1],
        token=token,
        outcome=_chain_outcome(accepted, len(drafted)),
        p=[float(a == b) for a, b in zip(chosen, drafted)],
        q=[1.0] * len(drafted),
        token_p=1.0,
    )


def _judge_sampled(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Step:
    k = len(draft)
    uniforms = uniforms[: k + 1]
    p = sampling.probabilities(logits)
    verdict = verify_chain(p, draft.tokens, draft.probs, uniforms)
    drafted = draft.tokens[:, None]
    p_of = p[:-1].gather(1, drafted)[:, 0]
    q_of = torch.ones_like(p_of) if draft.probs is None else draft.probs.gather(1, drafted)[:, 0]
    token_p = p.take(verdict.accepted * p.shape[1] + verdict.token)
    ids = torch.cat([torch.stack([verdict.accepted, verdict.token]), draft.tokens])
    # The round's one synchronisation. float32 holds ids up to 2**24 exactly; a NaN in a row of logits makes all
    # probabilities of the row NaN, so one column tells.
    packed = torch.cat([p[:, 0].sum()[None], token_p[None], ids.float(), p_of, q_of, uniforms[:-1]]).tolist()
    _check_finite(all(x == x for x in packed))
    accepted, token = int(packed[2]), int(packed[3])
    return Step(
        draft=draft,
        logits=logits,
        drafted=[int(x) for x in packed[4 : 4 + k]],
        path=list(range(accepted)),
        rejected=list(range(accepted, k))[:1],
        token=token,
        outcome=_chain_outcome(accepted, k),
        p=packed[4 + k : 4 + 2 * k],
        q=packed[4 + 2 * k : 4 + 3 * k],
        draws=packed[4 + 3 * k :],
        token_p=packed[1],
    )


def _judge_tree(logits: Tensor, draft: Draft, parents: list[int], sampling: Sampling, uniforms: Tensor) -> Step:
    rows = [parent + 1 for parent in parents]
    k = len(parents)
    draws: list[float | None] = []
    if sampling.greedy:
        best, choices = logits.max(-1)
        # The round's one synchronisation, here and below.
        packed = torch.cat([best.isfinite().all().long()[None], choices, draft.tokens]).tolist()
        finite, chosen, tokens = bool(packed[0]), packed[1 : k + 2], packed[k + 2 :]
        _check_finite(finite)
        verdict = verify_tree_greedy(chosen, tokens, parents)
        p_of = [float(chosen[row] == token) for row, token in zip(rows, tokens)]
        q_of, token_p = [1.0] * k, 1.0
    else:
        law = sampling.probabilities(logits)
        p, ids, uniforms, *laws = on_host(
            law, draft.tokens, uniforms[: k + 1], *([] if draft.probs is None else [draft.probs])
        )
        q = laws[0] if laws else None
        _check_finite(not bool(p[:, 0].isnan().any()))
        tokens = ids.long().tolist()
        verdict = verify_tree(p, tokens, parents, q, uniforms, draft.replacement)
        p_of = [p[row, token].item() for row, token in zip(rows, tokens)]
        q_of = [1.0 if q is None else q[i, token].item() for i, token in enumerate(tokens)]
        token_p = p[verdict.path[-1] + 1 if verdict.path else 0, verdict.token].item()
        draws = list(uniforms[:-1].tolist())
    return Step(
        draft=draft,
        logits=logits,
        drafted=tokens,
        path=verdict.path,
        rejected=verdict.rejected,
        token=verdict.token,
        outcome=_tree_outcome(verdict),
        p=p_of,
        q=q_of,
        draws=draws,
        token_p=token_p,
    )


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the CPU: as they are if there already, else in one transfer as float32, exact for ids up to 2**24."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    pieces = torch.cat([tensor.float().flatten() for tensor in tensors]).cpu().split([t.numel() for t in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]


def _chain_outcome(accepted: int, drafted: int) -> Outcome:
    return "plain" if not drafted else "corrected" if accepted < drafted else "bonus"


def _tree_outcome(verdict: TreeVerdict) -> Outcome:
    return "corrected" if verdict.corrected else "bonus"


def _check_finite(finite: bool) -> None:
    if not finite:
        raise UserError(
            "A model returned logits that are not numbers (NaN or infinite), so nothing can be drawn from them; "
            "try another precision (bf16 instead of fp16), or check the weights."
        )
