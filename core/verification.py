"""Accept, correct, bonus: the rule that makes speculative decoding lossless. Pure functions on tensors.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for chains, SpecInfer (arXiv
2305.09781) for trees. `p` is the target's and `q` the drafter's distribution after the whole sampler chain.

A drafted token x ~ q is accepted with probability min(1, p(x)/q(x)). At the first rejection the corrected token is
drawn from norm(max(0, p - q)) and the round ends. When all are accepted a bonus token is drawn from p at the next
position. The output is then distributed exactly as if the target had sampled alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.sampling import draw

NOTHING = 1e-30
"""A residual no heavier than this is what rounding left of p - q."""


class Verdict(NamedTuple):
    """`accepted` [1] int64: how many drafted tokens stand; `token` [1] int64: the one that follows them (corrected if
    fewer than all were accepted, bonus otherwise; with nothing drafted, plain). To show: what the two laws gave the
    drafted tokens, `p` and `q` [γ] float32, and what the target's gave `token`, `token_p` [1] float32."""

    accepted: Tensor
    token: Tensor
    p: Tensor
    q: Tensor
    token_p: Tensor


class TreeVerdict(NamedTuple):
    """`path` and `rejected`: indices of the nodes that stand, in order, and of those refused; `token` follows the
    path, `corrected` where the last node's children were all refused, else free (bonus)."""

    path: list[int]
    rejected: list[int]
    token: int
    corrected: bool


def verify_chain(p: Tensor, tokens: Tensor, q: Tensor | None, uniforms: Tensor) -> Verdict:
    """Judge a chain of γ drafted tokens left to right.

    p [γ+1, vocab] float32: row i is the target's law given the context and tokens[:i]; tokens [γ] int64;
    q [γ, vocab] float32: row i is what tokens[i] was drawn from, or None for point masses; uniforms [γ+1] in [0, 1):
    one per acceptance test and one for the token that follows. No data-dependent control flow: one pass on a device.
    """
    if not len(tokens):
        token, none = draw(p, uniforms), uniforms[:0]
        return Verdict(torch.zeros_like(token), token, none, none, p.take(token))
    drafted = tokens[:, None]
    if q is None:
        q = torch.zeros_like(p[:-1]).scatter_(1, drafted, 1.0)
    p_of, q_of = p.gather(1, drafted)[:, 0], q.gather(1, drafted)[:, 0]
    accepted = (uniforms[:-1] * q_of < p_of).cumprod(0).sum(0, keepdim=True)
    # A row of zeros after the last draft makes the bonus the same formula: nothing to subtract.
    law, subtracted = p.index_select(0, accepted), pad(q, (0, 0, 0, 1)).index_select(0, accepted)
    token = draw(residual(law, subtracted), uniforms[-1:])
    return Verdict(accepted, token, p_of, q_of, law.take(token))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) over the last axis, not normalised; p itself where nothing is left (p = q: never rejected)."""
    left = (p - q).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > NOTHING, left, p)


def verify_tree(
    p: Tensor, tokens: Sequence[int], parents: Sequence[int], q: Tensor | None, uniforms: Tensor, replacement: bool
) -> TreeVerdict:
    """Judge a token tree from the root down; siblings in the order they were drawn.

    p [k+1, vocab] float32: row 0 is the target's law after the context, row i+1 after node i. tokens, parents [k]:
    parents[i] < i, -1 for the context. q [k, vocab] float32: row i is the law the *first* sibling of node i was drawn
    from, or None where siblings are point masses in turn. `replacement`: siblings were drawn independently of each
    other; else each from q without those before it. uniforms [k+1] in [0, 1): one per node and one for the token that
    follows. All on the CPU: walking a tree is the host's work.

    After each rejected sibling the law left to the others is norm(max(0, p - q)); a duplicate is tested again and
    subtracts q again. When all fail, the corrected token is drawn from what is left.
    """
    path: list[int] = []
    rejected: list[int] = []
    draws: list[float] = uniforms.tolist()
    node: int | None = -1
    while node is not None:
        law = p[node + 1]
        children = [i for i, parent in enumerate(parents) if parent == node]
        node = None
        proposal = None if q is None or not children else q[children[0]]
        for child in children:
            token = tokens[child]
            tested = _point_mass(law, token) if proposal is None else proposal
            if draws[child] * tested[token].item() < law[token].item():
                path.append(child)
                node = child
                break
            rejected.append(child)
            law = residual(law, tested)
            if child == children[-1]:
                break
            law = _normalised(law)
            if proposal is not None and not replacement:
                proposal = proposal.clone()
                proposal[token] = 0.0
                proposal = _normalised(proposal)
    return TreeVerdict(path, rejected, int(draw(law, uniforms[-1])), corrected=bool(children))


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


def _point_mass(like: Tensor, token: int) -> Tensor:
    mass = torch.zeros_like(like)
    mass[token] = 1.0
    return mass


def _normalised(law: Tensor) -> Tensor:
    return law / law.sum()
