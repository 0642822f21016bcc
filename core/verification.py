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

from core.sampling import draw


class Verdict(NamedTuple):
    """`accepted` [] int64: how many drafted tokens stand; `token` [] int64: the one that follows them (corrected if
    fewer than all were accepted, bonus otherwise; with nothing drafted, plain)."""

    accepted: Tensor
    token: Tensor


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
        return Verdict(torch.zeros((), dtype=torch.long, device=p.device), draw(p[0], uniforms[0]))
    drafted = tokens[:, None]
    p_of = p[:-1].gather(1, drafted)[:, 0]
    if q is None:
        q = torch.zeros_like(p[:-1]).scatter_(1, drafted, 1.0)
    q_of = q.gather(1, drafted)[:, 0]
    stands = uniforms[:-1] * q_of < p_of
    accepted = stands.long().cumprod(0).sum()
    # A row of zeros after the last draft makes the bonus the same formula: nothing to subtract.
    subtracted = torch.cat([q, torch.zeros_like(p[-1:])])
    row = accepted[None]  # indexing by a tensor of no dimension would ask the device for its value
    token = draw(residual(p.index_select(0, row)[0], subtracted.index_select(0, row)[0]), uniforms[-1])
    return Verdict(accepted, token)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) over the last axis, not normalised; p itself where nothing is left (p = q: never rejected)."""
    left = (p - q).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def verify_greedy(choices: Tensor, tokens: Tensor) -> Verdict:
    """The limit of `verify_chain` at temperature 0: both laws are one-hot.

    choices [γ+1] int64: the target's most likely token at each position; tokens [γ] int64.
    """
    accepted = (choices[:-1] == tokens).long().cumprod(0).sum()
    return Verdict(accepted, choices.take(accepted))


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
    node: int | None = -1
    while node is not None:
        law = p[node + 1]
        children = [i for i, parent in enumerate(parents) if parent == node]
        node = None
        proposal = None if q is None or not children else q[children[0]]
        for child in children:
            token = tokens[child]
            tested = _point_mass(law, token) if proposal is None else proposal
            if uniforms[child] * tested[token] < law[token]:
                path.append(child)
                node = child
                break
            rejected.append(child)
            law = _normalised(residual(law, tested))
            if proposal is not None and not replacement:
                proposal = _normalised(proposal.index_fill(0, torch.tensor(token), 0.0))
    return TreeVerdict(path, rejected, int(draw(law, uniforms[-1])), corrected=bool(children))


def verify_tree_greedy(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> TreeVerdict:
    """The limit of `verify_tree` at temperature 0. choices [k+1]: the target's most likely token at each row of p."""
    path: list[int] = []
    rejected: list[int] = []
    node = -1
    while True:
        children = [i for i, parent in enumerate(parents) if parent == node]
        hit = next((i for i in children if tokens[i] == choices[node + 1]), None)
        rejected += children if hit is None else [i for i in children if i < hit]
        if hit is None:
            return TreeVerdict(path, rejected, choices[node + 1], corrected=bool(children))
        path.append(hit)
        node = hit


def _point_mass(like: Tensor, token: int) -> Tensor:
    return torch.zeros_like(like).index_fill(0, torch.tensor(token), 1.0)


def _normalised(law: Tensor) -> Tensor:
    return law / law.sum()
