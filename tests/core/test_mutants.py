"""Tests of the tests: rules that are wrong in well-known ways must fail the law check."""

import pytest
import torch
from drafters import DRAFTS, TARGET, make_drafter
from lookup import BLOCK, CPU, LookupRunner, block_law, count_blocks, decode, p_value
from test_law import DRAWS, THRESHOLD, TREE_DRAWS

from core import verification
from core.drafting import Draft
from core.drafting.model import ModelDrafter
from core.drafting.ngram import NgramDrafter
from core.drafting.tree import TreeDrafter
from core.sampling import Sampling, draw
from core.verification import residual, verify_chain, verify_siblings

SAMPLING = Sampling(temperature=0.7, top_k=4)


def law_of(drafter, target, sampling=SAMPLING, gamma=2, seen=DRAWS):
    """The p-value of the law check."""
    run = decode(target, drafter, sampling, gamma, seen * BLOCK, seed=5)
    return p_value(count_blocks(run.token_ids), block_law(TARGET, sampling))


def no_residual(p, tokens, q, uniforms):
    """The corrected token drawn from p instead of norm(max(0, p - q))."""
    verdict = verify_chain(p, tokens, q, uniforms)
    return verdict._replace(token=draw(p[verdict.accepted], uniforms[-1]))


def no_bonus_row(p, tokens, q, uniforms):
    """The bonus token drawn from the law of the position before it."""
    verdict = verify_chain(p, tokens, q, uniforms)
    last = draw(p[-2:][0], uniforms[-1])
    return verdict._replace(token=torch.where(verdict.accepted == len(tokens), last, verdict.token))


def match_and_draw_again(p, tokens, q, uniforms):
    """y ~ p, accepted if it equals the drafted token; on a mismatch another y is drawn instead of that one."""
    ys = draw(p[:-1], uniforms[:-1])
    accepted = (ys == tokens).cumprod(0).sum(0, keepdim=True)
    verdict = verify_chain(p, tokens, q, uniforms)
    return verdict._replace(accepted=accepted, token=draw(p[accepted], uniforms[-1]))


def accept_by_ratio_of_argmax(p, tokens, q, uniforms):
    """Accept whatever the target gives at least half the chance of its favourite: typical acceptance, lossy."""
    if q is None:  # a round without a draft
        return verify_chain(p, tokens, q, uniforms)
    p_of = p[:-1].gather(1, tokens[:, None])[:, 0]
    accepted = (p_of >= 0.5 * p[:-1].amax(-1)).cumprod(0).sum(0, keepdim=True)
    subtracted = torch.cat([q, torch.zeros_like(p[-1:])])
    token = draw(residual(p[accepted], subtracted[accepted]), uniforms[-1])
    return verify_chain(p, tokens, q, uniforms)._replace(accepted=accepted, token=token)


def reuse_the_acceptance_draw(p, tokens, q, uniforms):
    """The corrected token drawn with the uniform number that rejected: not independent of the rejection."""
    if q is None:  # a round without a draft
        return verify_chain(p, tokens, q, uniforms)
    verdict = verify_chain(p, tokens, q, uniforms)
    accepted, subtracted = verdict.accepted, torch.cat([q, torch.zeros_like(p[-1:])])
    return verdict._replace(token=draw(residual(p[accepted], subtracted[accepted]), uniforms[accepted]))


CHAIN_MUTANTS = [no_residual, no_bonus_row, accept_by_ratio_of_argmax, reuse_the_acceptance_draw]


@pytest.mark.parametrize("mutant", CHAIN_MUTANTS, ids=lambda f: f.__name__)
def test_wrong_rule_with_a_draft_model(mutant, monkeypatch):
    """Each wrong acceptance rule shows in the joint law."""
    monkeypatch.setattr(verification, "verify_chain", mutant)
    target = LookupRunner(TARGET)
    assert law_of(make_drafter("draft", target, DRAFTS["similar"], SAMPLING), target) < THRESHOLD


@pytest.mark.parametrize("mutant", [no_residual, match_and_draw_again], ids=lambda f: f.__name__)
def test_wrong_rule_with_ngrams(mutant, monkeypatch):
    """With a point mass the residual is p without the drafted token; drawing from all of p again favours it."""
    monkeypatch.setattr(verification, "verify_chain", mutant)
    assert law_of(NgramDrafter(CPU), LookupRunner(TARGET)) < THRESHOLD


class Lying(ModelDrafter):
    """Gives as `probs` something its tokens were not drawn from."""

    def __init__(self, told: Sampling) -> None:
        super().__init__(LookupRunner(DRAFTS["similar"]), SAMPLING)
        self._told = told

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        return Draft(draft.tokens, self._told.probabilities(torch.cat(draft.logits)), logits=draft.logits)


def test_raw_q_instead_of_the_one_drawn_from():
    """Probabilities without top-k and temperature, tokens with: the commonest fault in public code."""
    assert law_of(Lying(told=Sampling(temperature=1.0)), LookupRunner(TARGET)) < THRESHOLD


class ArgmaxWithSoftQ(ModelDrafter):
    """Drafts greedily and hands over the soft distribution as if it had been sampled."""

    def __init__(self) -> None:
        super().__init__(LookupRunner(DRAFTS["similar"]), Sampling(0.0))

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        return Draft(draft.tokens, SAMPLING.probabilities(torch.cat(draft.logits)))


def test_greedy_draft_with_a_soft_q():
    """A deterministic draft is a point mass; verified as if drawn from a soft q the law breaks."""
    assert law_of(ArgmaxWithSoftQ(), LookupRunner(TARGET)) < THRESHOLD


class DiscardUnlikely(ModelDrafter):
    """Draws a token, finds it unlikely and drops it with all that follow."""

    def __init__(self, threshold: float) -> None:
        super().__init__(LookupRunner(DRAFTS["similar"]), SAMPLING)
        self._threshold = threshold

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        sure = draft.probs.gather(1, draft.tokens[:, None])[:, 0] >= self._threshold
        keep = int(sure.long().cumprod(0).sum())
        return Draft(draft.tokens[:keep], draft.probs[:keep], logits=draft.logits[:keep])


def test_discard_after_the_draw():
    """Stopping early is lossless only if decided before the draw or after including the token."""
    assert law_of(DiscardUnlikely(threshold=0.3), LookupRunner(TARGET)) < THRESHOLD


def accept_at_equality(p, tokens, q, uniforms):
    """u·q <= p instead of u·q < p: at u = 0, one draw in 2**24, it accepts what the target excludes."""
    if q is None:
        return verify_chain(p, tokens, q, uniforms)
    drafted = tokens[:, None]
    stands = uniforms[:-1] * q.gather(1, drafted)[:, 0] <= p[:-1].gather(1, drafted)[:, 0]
    accepted = stands.cumprod(0).sum(0, keepdim=True)
    return verify_chain(p, tokens, q, uniforms)._replace(accepted=accepted)


@pytest.mark.parametrize(("rule", "writes"), [(verify_chain, False), (accept_at_equality, True)])
def test_only_a_strict_comparison_never_writes_the_impossible(rule, writes, monkeypatch):
    """With every uniform number 0 the right rule still writes nothing that top-k has excluded."""
    monkeypatch.setattr(verification, "verify_chain", rule)
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.zeros(size))
    sampling = Sampling(temperature=1.0, top_k=2)
    target = LookupRunner(TARGET)
    run = decode(target, make_drafter("draft", target, DRAFTS["disjoint"], sampling), sampling, 2, 60, seed=0)
    assert bool(count_blocks(run.token_ids)[block_law(TARGET, sampling) == 0].any()) == writes


def law_of_tree(shape, replacement, drafter=TreeDrafter, draft="similar", seen=DRAWS):
    target = LookupRunner(TARGET)
    tree = drafter(LookupRunner(DRAFTS[draft]), SAMPLING, lambda: shape, replacement=replacement)
    return law_of(tree, target, gamma=len(shape), seen=seen)


def skip_duplicates(p, siblings, tokens, q, uniforms, replacement):
    """An i.i.d. sibling that repeats a rejected one is not tested again."""
    new = [[i for n, i in enumerate(each) if tokens[i] not in tokens[each[:n]]] for each in siblings]
    return verify_siblings(p, new, tokens, q, uniforms, replacement)


def other_replacement(p, siblings, tokens, q, uniforms, replacement):
    """Siblings drawn one way, judged as if drawn the other."""
    return verify_siblings(p, siblings, tokens, q, uniforms, not replacement)


def untouched_between_siblings(p, siblings, tokens, q, uniforms, replacement):
    """Every sibling is tested against the target's first law; nothing is subtracted until all have failed."""
    taken, left = torch.full((len(p),), -1), p.clone()
    for row, children in enumerate(siblings):
        stands = [i for i in children if uniforms[i] * q[i, tokens[i]] < p[row, tokens[i]]]
        if stands:
            taken[row] = stands[0]
        elif children:
            left[row] = residual(p[row], q[children[0]])
    return taken, left


def nothing_left_out(p, siblings, tokens, q, uniforms, replacement):
    """All siblings refused, and the corrected token drawn from the target's whole law."""
    return verify_siblings(p, siblings, tokens, q, uniforms, replacement)[0], p


TREE_MUTANTS = [
    (skip_duplicates, True, TREE_DRAWS),
    (other_replacement, True, DRAWS),
    (other_replacement, False, DRAWS),
    (untouched_between_siblings, True, DRAWS),
    (untouched_between_siblings, False, DRAWS),
    (nothing_left_out, False, DRAWS),
]


@pytest.mark.parametrize("mutant, replacement, seen", TREE_MUTANTS)
def test_wrong_rule_with_siblings(mutant, replacement, seen, monkeypatch):
    """Each wrong way of trying siblings shows in the joint law, soonest where a draft's favourite is always refused."""
    monkeypatch.setattr(verification, "verify_siblings", mutant)
    assert law_of_tree((4,), replacement, draft="obsessed", seen=seen) < THRESHOLD


class LikeliestWithSoftQ(TreeDrafter):
    """Siblings are the likeliest tokens, handed over as if they had been drawn."""

    def _siblings(self, rows, uniforms, width):
        return rows.topk(width).indices.flatten(), [width] * len(rows), SAMPLING.probabilities(rows)


def test_likeliest_siblings_with_a_soft_q():
    """Deterministic siblings are point masses in turn; judged by a soft q the law breaks."""
    assert law_of_tree((2,), replacement=False, drafter=LikeliestWithSoftQ) < THRESHOLD


@pytest.mark.parametrize("replacement, seen", [(True, TREE_DRAWS), (False, DRAWS)])
def test_the_unbroken_rule_for_siblings_passes_the_same_check(replacement, seen):
    """The trees of the faults above, judged as they should be."""
    assert law_of_tree((4,), replacement, draft="obsessed", seen=seen) > THRESHOLD


class KeepsTheRejected(LookupRunner):
    """Rolls back to the right length, but drops an accepted token and keeps the last one fed in its place."""

    def truncate(self, length: int) -> None:
        last = self.rows[-1]
        super().truncate(length)
        self.rows[-1] = last


def test_target_cache_keeps_a_rejected_token():
    """A cache of the right length with a wrong entry answers for a text that was never written."""
    target = KeepsTheRejected(TARGET)
    assert law_of(make_drafter("draft", target, DRAFTS["similar"], SAMPLING), target) < THRESHOLD


def test_the_unbroken_rule_passes_the_same_check():
    """What fails above fails for its fault, not for the check."""
    target = LookupRunner(TARGET)
    assert law_of(make_drafter("draft", target, DRAFTS["similar"], SAMPLING), target) > THRESHOLD
    assert law_of(NgramDrafter(CPU), LookupRunner(TARGET)) > THRESHOLD
