"""Accept, correct, bonus: the rule that makes speculative decoding lossless. Pure functions on tensors.

`judge` comes from logits and a draft to a verdict; the rule itself is `verify_chain`, `verify_siblings` at every node
of a tree, and their limit at temperature 0, `verify_greedy`.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for chains, SpecInfer (arXiv
2305.09781) for trees. `p` is the target's and `q` the drafter's distribution after the whole sampler chain.

A drafted token x ~ q is accepted with probability min(1, p(x)/q(x)). At the first rejection the corrected token is
drawn from norm(max(0, p - q)) and the round ends. When all are accepted a bonus token is drawn from p at the next
position. The output is then distributed exactly as if the target had sampled alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, isnan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.drafting import Draft
from core.errors import UserError
from core.records import Outcome
from core.runners import Favourites
from core.runners.capture import replayed
from core.runners.host import ids_on, lists_on_host
from core.sampling import Sampling, draw, likeliest

NOTHING = 1e-30
"""A residual no heavier than this is what rounding left of p - q."""


@dataclass(slots=True)
class Verdict:
    """What became of a draft of k tokens, on the host. `drafted`: their ids.

    `path`: indices of the accepted ones in order; `rejected`: of those judged and refused; `token` follows the path,
    with its `outcome`. What target and drafter gave the drafted tokens, `p` and `q` [k], and the target `token`;
    `draws` [k] are the uniform numbers of the acceptance tests, none where nothing is drawn (greedy).
    """

    drafted: list[int]
    path: list[int]
    rejected: list[int]
    token: int
    outcome: Outcome
    p: list[float]
    q: list[float]
    token_p: float
    draws: list[float] = field(default_factory=list)


def judge(
    logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor, favourites: Favourites | None = None
) -> Verdict:
    """Judge a draft of k tokens by the target's logits [k+1, vocab], whose `favourites` the pass may have told;
    uniforms [≥ k+1] in [0, 1), the first k for the acceptance tests and the next for the token that follows. Raises
    UserError for logits that are not numbers."""
    if sampling.greedy:
        return _judge_greedy(logits, draft, favourites)
    if draft.parents is not None and len(draft):
        return _judge_tree(logits, draft, draft.parents, sampling, uniforms)
    return _judge_chain(logits, draft, sampling, uniforms)


def _judge_greedy(logits: Tensor, draft: Draft, favourites: Favourites | None) -> Verdict:
    k = len(draft)
    best, choices = (favourites.largest, favourites.ids) if favourites else likeliest(logits)
    largest, chosen, drafted = lists_on_host(best, choices, draft.tokens)
    _check_numbers(all(map(isfinite, largest)))
    parents = list(range(-1, k - 1)) if draft.parents is None else draft.parents
    found = verify_greedy(chosen, drafted, parents)
    p = [float(chosen[parent + 1] == token) for parent, token in zip(parents, drafted)]
    outcome = _outcome(k, found.corrected)
    return Verdict(drafted, found.path, found.rejected, found.token, outcome, p, q=[1.0] * k, token_p=1.0)


def _judge_chain(logits: Tensor, draft: Draft, sampling: Sampling, uniforms: Tensor) -> Verdict:
    k = len(draft)
    uniforms = uniforms[: k + 1]
    given = (logits, draft.tokens, uniforms) if draft.probs is None else (logits, draft.tokens, uniforms, draft.probs)
    key = sampling, logits.shape, logits.dtype, len(given)
    found = ChainVerdict(*replayed(logits.device, key, partial(_chain, sampling), given))
    (accepted,), (token,), (token_p,), drafted, p, q, draws = lists_on_host(
        found.accepted, found.token, found.token_p, draft.tokens, found.p, found.q, uniforms[:-1]
    )
    # A NaN among a row of logits makes all probabilities of the row NaN, whichever of them is looked at.
    _check_numbers(not any(map(isnan, (token_p, *p, *q))))
    path, rejected = list(range(accepted)), list(range(accepted, k))[:1]
    return Verdict(drafted, path, rejected, token, _outcome(k, accepted < k), p, q, token_p, draws)


def _chain(
    sampling: Sampling, logits: Tensor, tokens: Tensor, uniforms: Tensor, q: Tensor | None = None
) -> tuple[Tensor, ...]:
    return tuple(verify_chain(sampling.probabilities(logits), tokens, q, uniforms))


def _judge_tree(logits: Tensor, draft: Draft, parents: list[int], sampling: Sampling, uniforms: Tensor) -> Verdict:
    k = len(parents)
    p, q, tokens, uniforms = sampling.probabilities(logits), draft.probs, draft.tokens, uniforms[: k + 1]
    taken, following = verify_tree(p, tokens, parents, q, uniforms, draft.replacement)
    above = ids_on(p.device, [parent + 1 for parent in parents])
    of_following = p.gather(1, following[:, None])[:, 0]
    given = () if q is None else (q.gather(1, tokens[:, None])[:, 0],)
    to, tokens_after, p_after, drafted, p_of, numbers, *q_of = lists_on_host(
        taken, following, of_following, tokens, p[above, tokens], uniforms, *given
    )
    path, rejected, token, corrected = follow(to, tokens_after, parents)
    token_p = p_after[path[-1] + 1 if path else 0]
    _check_numbers(not any(map(isnan, [token_p, *p_of])))
    outcome, q_given = _outcome(k, corrected), q_of[0] if q_of else [1.0] * k
    return Verdict(drafted, path, rejected, token, outcome, p_of, q_given, token_p, numbers[:-1])


def _outcome(drafted: int, corrected: bool) -> Outcome:
    return "plain" if not drafted else "corrected" if corrected else "bonus"


def _check_numbers(finite: bool) -> None:
    if not finite:
        raise UserError(
            "A model returned logits that are not numbers (NaN or infinite), so nothing can be drawn from them; "
            "try another precision (bf16 instead of fp16), or check the weights."
        )


class ChainVerdict(NamedTuple):
    """`accepted` [1] int64: how many drafted tokens stand; `token` [1] int64: the one that follows them (corrected if
    fewer than all were accepted, bonus otherwise; with nothing drafted, plain). To show: what the two laws gave the
    drafted tokens, `p` and `q` [γ] float32, and what the target's gave `token`, `token_p` [1] float32."""

    p: Tensor
    q: Tensor
    token_p: Tensor
    accepted: Tensor
    token: Tensor


class TreeVerdict(NamedTuple):
    """`path` and `rejected`: indices of the nodes that stand, in order, and of those refused; `token` follows the
    path, `corrected` where the last node's children were all refused, else free (bonus)."""

    path: list[int]
    rejected: list[int]
    token: int
    corrected: bool


def verify_chain(p: Tensor, tokens: Tensor, q: Tensor | None, uniforms: Tensor) -> ChainVerdict:
    """Judge a chain of γ drafted tokens left to right.

    p [γ+1, vocab] float32: row i is the target's law given the context and tokens[:i]; tokens [γ] int64;
    q [γ, vocab] float32: row i is what tokens[i] was drawn from, or None for point masses; uniforms [γ+1] in [0, 1):
    one per acceptance test and one for the token that follows. No data-dependent control flow: one pass on a device.
    """
    if not len(tokens):
        token, none = draw(p, uniforms), uniforms[:0]
        return ChainVerdict(none, none, p.take(token), torch.zeros_like(token), token)
    drafted = tokens[:, None]
    if q is None:
        q = torch.zeros_like(p[:-1]).scatter_(1, drafted, 1.0)
    p_of, q_of = p.gather(1, drafted)[:, 0], q.gather(1, drafted)[:, 0]
    accepted = (uniforms[:-1] * q_of < p_of).cumprod(0).sum(0, keepdim=True)
    # A row of zeros after the last draft makes the bonus the same formula: nothing to subtract.
    law, subtracted = p.index_select(0, accepted), pad(q, (0, 0, 0, 1)).index_select(0, accepted)
    token = draw(residual(law, subtracted), uniforms[-1:])
    return ChainVerdict(p_of, q_of, law.take(token), accepted, token)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) over the last axis, not normalised; p itself where nothing is left (p = q: never rejected)."""
    left = (p - q).clamp_(min=0)
    return left.add_(p * (left.sum(-1, keepdim=True) <= NOTHING))  # where() reads a broadcast condition slowly


def verify_siblings(
    p: Tensor, siblings: Sequence[Sequence[int]], tokens: Tensor, q: Tensor | None, uniforms: Tensor, replacement: bool
) -> tuple[Tensor, Tensor]:
    """The rule of a tree, at n of its nodes at once: p [n, vocab] float32 is the target's law after each, siblings[i]
    are those of the k drafted tokens that continue it, in the order they were drawn; tokens, q and uniforms as in
    `verify_tree`. Gives [n] int64, which of them stands (-1: none), and [n, vocab], what is left of the law: where none
    stands, the token that follows is drawn from it.

    After each rejected sibling the law left to the others is norm(max(0, p - q)); a duplicate is tested again and
    subtracts q again. No data-dependent control flow on a device, which does in one go what a host would have to wait
    for at every level.
    """
    order = sorted(range(len(p)), key=lambda node: -len(siblings[node]))  # whoever has siblings left comes first
    law = p.index_select(0, ids_on(p.device, order))
    taken = torch.full((len(p),), -1, dtype=torch.long, device=p.device)
    proposals = None if q is None else q.index_select(0, ids_on(p.device, [(*siblings[node], 0)[0] for node in order]))
    for rank in range(len(siblings[order[0]])):
        children = [siblings[node][rank] for node in order if len(siblings[node]) > rank]
        m, more = len(children), sum(len(each) > rank + 1 for each in siblings)
        child, left, free = ids_on(p.device, children), law[:m], taken[:m] < 0
        token = tokens.index_select(0, child)[:, None]
        tested = torch.zeros_like(left).scatter_(1, token, 1.0) if proposals is None else proposals[:m]
        stands = uniforms[child] * tested.gather(1, token)[:, 0] < left.gather(1, token)[:, 0]
        taken[:m] = torch.where(free & stands, child, taken[:m])
        if walks_on_host(p) and taken.min() >= 0:
            break
        law[:m] = residual(left, tested * (free & ~stands)[:, None])
        law[:more] = _normalised(law[:more])
        if proposals is not None and not replacement:
            proposals[:more] = _normalised(proposals[:more].scatter(1, token[:more], 0.0))
    back = ids_on(p.device, sorted(range(len(p)), key=order.__getitem__))
    return taken.index_select(0, back), law.index_select(0, back)


def verify_tree(
    p: Tensor, tokens: Tensor, parents: Sequence[int], q: Tensor | None, uniforms: Tensor, replacement: bool
) -> tuple[Tensor, Tensor]:
    """Judge a token tree: for each row of p, [k+1] int64, the index of the child that stands there, -1 for none, and
    the token that follows where none does; `follow` reads a path off that.

    p [k+1, vocab] float32: row 0 is the target's law after the context, row i+1 after node i. tokens [k] int64, parents
    [k]: parents[i] < i, -1 for the context. q [k, vocab] float32: row i is the law the *first* sibling of node i was
    drawn from, or None where siblings are point masses in turn. `replacement`: siblings were drawn independently of
    each other; else each from q without those before it. uniforms [k+1] in [0, 1): one per node and one for the token
    that follows. A host judges the nodes that are reached, from the root down, and no others; a device all of them.
    """
    below: list[list[int]] = [[] for _ in range(len(p))]
    for child, parent in enumerate(parents):
        below[parent + 1].append(child)
    if not walks_on_host(p):
        taken, law = verify_siblings(p, below, tokens, q, uniforms, replacement)
        return taken, draw(law, uniforms[-1:].expand(len(p)))
    taken, following = torch.full((len(p),), -1), torch.zeros(len(p), dtype=torch.long)
    row, stands = slice(0, 1), 0
    while stands >= 0:
        taken[row], law = verify_siblings(p[row], below[row], tokens, q, uniforms, replacement)
        last, stands = row, int(taken[row])
        row = slice(stands + 1, stands + 2)
    following[last] = draw(law, uniforms[-1:])
    return taken, following


def walks_on_host(p: Tensor) -> bool:
    """Whether a tree is judged node by node: where what a node comes to need not be waited for."""
    return p.device.type == "cpu"


def follow(taken: Sequence[int], following: Sequence[int], parents: Sequence[int]) -> TreeVerdict:
    """The verdict that `verify_tree` comes to, from the root."""
    found = verify_greedy(taken, range(len(parents)), parents)
    return found._replace(token=following[found.path[-1] + 1 if found.path else 0])


def verify_greedy(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> TreeVerdict:
    """The limit of both rules at temperature 0, where laws are one-hot: a token stands if it is the target's choice.

    choices [k+1]: the target's most likely token at each row of p; tokens, parents [k] as in `verify_tree`: a chain is
    a tree whose every node continues the one before it.
    """
    path: list[int] = []
    rejected: list[int] = []
    node = -1
    for i, parent in enumerate(parents):  # whoever continues a node comes after it
        if parent != node:
            continue
        if tokens[i] == choices[node + 1]:
            path.append(i)
            node = i
        else:
            rejected.append(i)
    corrected = bool(rejected) and parents[rejected[-1]] == node
    return TreeVerdict(path, rejected, choices[node + 1], corrected)


def _normalised(law: Tensor) -> Tensor:
    return law / law.sum(-1, keepdim=True)
