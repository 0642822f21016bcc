"""Accept, correct, bonus: single cases by hand. Their law as a whole is tested through the loop, in test_law."""

import pytest
import torch

from core import verification
from core.verification import follow, residual, verify_chain, verify_greedy, verify_siblings, verify_tree

P = torch.tensor([0.6, 0.3, 0.1])
Q = torch.tensor([0.2, 0.3, 0.5])


def chain(p, tokens, q, uniforms):
    verdict = verify_chain(p, torch.tensor(tokens), q, torch.tensor(uniforms))
    return verdict.accepted.item(), verdict.token.item()


def tree(p, tokens, parents, q, uniforms, replacement=False):
    taken, following = verify_tree(p, torch.tensor(tokens), parents, q, torch.tensor(uniforms), replacement)
    return follow(taken.tolist(), following.tolist(), parents)


def one_round(p, q):
    """The exact law of the first token of a round that drafts one: Σ over the drafted token, u integrated."""
    accept = torch.minimum(p, q)
    return accept + (1 - accept.sum()) * residual(p, q) / residual(p, q).sum()


@pytest.mark.parametrize("q", [Q, P, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1 / 3, 1 / 3, 1 / 3])])
def test_rule_gives_back_p(q):
    """min(p, q) + (1 - Σ min(p, q)) · norm(max(0, p - q)) = p."""
    torch.testing.assert_close(one_round(P, q), P)


def test_accepts_below_the_ratio_and_refuses_from_it_on():
    """Token 2 has p/q = .2: accepted for u < .2. The corrected token then comes from the residual, here always 0."""
    p = P.expand(2, 3)
    assert chain(p, [2], Q[None], [0.199, 0.0]) == (1, 0)
    assert chain(p, [2], Q[None], [0.201, 0.999]) == (0, 0)


def test_likelier_for_the_target_is_always_accepted():
    assert chain(P.expand(2, 3), [0], Q[None], [1 - 2**-24, 0.95]) == (1, 2)


@pytest.mark.parametrize("q", [Q[None], None])
def test_impossible_token_is_refused_even_at_zero(q):
    """The comparison is strict: u = 0 does not accept what has p = 0."""
    p = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.3, 0.5]])
    accepted, token = chain(p, [2], q, [0.0, 0.0])
    assert (accepted, token) == (0, 0)


def test_what_follows_a_rejection_is_not_judged():
    """The second of three is refused: the third, though certain, is ignored."""
    p = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 1.0]])
    assert chain(p, [0, 0, 2], None, [0.5, 0.5, 0.5, 0.5]) == (1, 1)


def test_bonus_comes_from_the_row_after_the_last_draft():
    p = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    assert chain(p, [0, 1], None, [0.5, 0.5, 0.5]) == (2, 2)


def test_point_mass_refused_leaves_p_without_it():
    """On a mismatch the corrected token is never the drafted one."""
    p = P.expand(2, 3)
    for u in torch.linspace(0, 0.999, 20).tolist():
        assert chain(p, [0], None, [0.61, u])[1] != 0
    assert chain(p, [0], None, [0.59, 0.0])[0] == 1


def test_nothing_drafted_is_a_plain_step():
    assert chain(P[None], [], None, [0.7]) == (0, 1)


def test_empty_residual_is_p_itself():
    """p = q leaves 0/0: the defined answer is p."""
    torch.testing.assert_close(residual(P, P), P)
    assert not residual(P, Q).isnan().any()


def test_greedy_is_the_limit_of_the_chain():
    """One-hot laws under verify_chain agree with verify_greedy, for every draft of two tokens."""
    choices = torch.tensor([1, 0, 2])
    one_hot = torch.nn.functional.one_hot(choices, 3).float()
    for tokens in torch.cartesian_prod(torch.arange(3), torch.arange(3)):
        greedy = verify_greedy(choices.tolist(), tokens.tolist(), [-1, 0])
        assert (len(greedy.path), greedy.token) == chain(one_hot, tokens.tolist(), None, [0.9, 0.9, 0.9])
        assert greedy.corrected == (len(greedy.path) < 2)


def test_a_tree_without_branches_is_a_chain():
    """The same verdicts, token by token, on random laws."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        p = torch.rand(4, 3, generator=generator)
        q = torch.rand(3, 3, generator=generator)
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        tokens = torch.randint(3, (3,), generator=generator).tolist()
        uniforms = torch.rand(4, generator=generator).tolist()
        verdict = tree(p, tokens, [-1, 0, 1], q, uniforms)
        accepted, token = chain(p, tokens, q, uniforms)
        assert (len(verdict.path), verdict.token) == (accepted, token)
        assert verdict.corrected == (accepted < 3)


def sibling_law(replacement):
    """The exact law of the first token with two siblings: Σ over both draws; every uniform number on a grid whose
    cells no threshold of these laws divides."""
    law = torch.zeros(3)
    grid = [(i + 0.5) / 5 for i in range(5)]
    rows = P.expand(3, 3)
    for first in range(3):
        second_law = Q if replacement else Q.index_fill(0, torch.tensor(first), 0.0) / (1 - Q[first])
        for second in range(3):
            weight = Q[first] * second_law[second] / len(grid) ** 3
            for u in grid:
                for v in grid:
                    for w in grid if weight > 0 else ():
                        verdict = tree(rows, [first, second], [-1, -1], Q.expand(2, 3), [u, v, w], replacement)
                        token = verdict.token if not verdict.path else [first, second][verdict.path[0]]
                        law[token] += weight
    return law


@pytest.mark.parametrize("replacement", [True, False])
def test_two_siblings_give_back_p(replacement):
    """Enumerated over both draws, integrated over the uniforms: the target's law."""
    torch.testing.assert_close(sibling_law(replacement), P, atol=1e-5, rtol=0)


def test_point_mass_siblings_in_turn():
    """Deterministic siblings: accept with p(x), else zero it and renormalise."""
    p = P.expand(3, 3)
    assert tree(p, [1, 2], [-1, -1], None, [0.29, 0.9, 0.0]).path == [0]
    second = tree(p, [1, 2], [-1, -1], None, [0.31, 0.14, 0.0])  # .1 / .7 = .143 is left to token 2
    assert (second.path, second.rejected, second.corrected) == ([1], [0], False)
    neither = tree(p, [1, 2], [-1, -1], None, [0.31, 0.15, 0.99])
    assert (neither.path, neither.rejected, neither.token, neither.corrected) == ([], [0, 1], 0, True)


def test_only_the_winners_children_are_judged():
    """Under a refused node nothing is tried; the path goes on below the sibling that won."""
    one_hot = torch.eye(3)
    p = one_hot[[1, 2, 0, 0, 2]]
    verdict = tree(p, [0, 1, 2, 0], [-1, -1, 0, 1], None, [0.5] * 5)
    assert (verdict.path, verdict.rejected, verdict.token, verdict.corrected) == ([1, 3], [0], 2, False)
    greedy = verify_greedy([1, 2, 0, 0, 2], [0, 1, 2, 0], [-1, -1, 0, 1])
    assert greedy == verdict


@pytest.mark.parametrize("replacement", [True, False])
def test_impossible_sibling_is_refused_even_at_zero(replacement):
    p = torch.tensor([0.5, 0.5, 0.0]).expand(3, 3)
    verdict = tree(p, [2, 0], [-1, -1], Q.expand(2, 3), [0.0, 0.0, 0.0], replacement)
    assert verdict.rejected[0] == 0


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_all_nodes_at_once_are_judged_as_one_by_one(replacement, soft, monkeypatch):
    """What a device does without asking the host is the same walk: same path, refusals and token, on random trees."""

    def judged(walks):
        monkeypatch.setattr(verification, "walks_on_host", lambda p: walks)
        taken, following = verify_tree(p, tokens, parents, q if soft else None, uniforms, replacement)
        return follow(taken.tolist(), following.tolist(), parents)

    draws = torch.Generator().manual_seed(11)
    met = set()
    for _ in range(150):
        k = int(torch.randint(1, 12, (), generator=draws))
        parents = [int(torch.randint(-1, i, (), generator=draws)) if i else -1 for i in range(k)]
        p = torch.rand(k + 1, 8, generator=draws).pow(4).softmax(-1)
        q = torch.rand(k, 8, generator=draws).pow(4).softmax(-1)
        tokens, uniforms = torch.randint(0, 8, (k,), generator=draws), torch.rand(k + 1, generator=draws)
        if not replacement:  # siblings without replacement are different tokens
            tokens = torch.tensor([parents[:i].count(parent) for i, parent in enumerate(parents)]) % 8
        own = judged(walks=True)
        assert judged(walks=False) == own
        met.add((len(own.path) > 1, len(own.rejected) > 1, own.corrected))
    assert len(met) >= 5


def test_of_a_tree_a_host_judges_the_nodes_that_are_reached(monkeypatch):
    """All of a large vocabulary's tree would be megabytes of arithmetic in every round."""
    judged = []

    def counting(p, siblings, *rest):
        judged.append(siblings)
        return verify_siblings(p, siblings, *rest)

    monkeypatch.setattr(verification, "verify_siblings", counting)
    p = torch.full((7, 8), 1 / 8)
    q = torch.full((6, 8), 1 / 8)
    p[1] = torch.eye(8)[3]  # after the first node, its second child is certain
    found = tree(p, [0, 1, 2, 3, 4, 5], [-1, -1, 0, 0, 1, 3], q, [0.0] * 7, replacement=True)
    assert found.path == [0, 3, 5]
    assert judged == [[[0, 1]], [[2, 3]], [[5]], [[]]]
